"""Table sizes of the Engram hash: primes never used twice, one per layer, n-gram size and head (model.md 2.11).

The model hashes with them, the loader checks the table's rows against their sum, the memory plan counts the rows.
"""

from math import isqrt

_MAX_PRIME = 1 << 31


def build_engram_primes(
    num_layers: int, *, max_ngram: int, vocab_size: int, num_heads: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Primes[layer][n-gram size - 2][head].

    For each layer and each n-gram size 2..max_ngram the search restarts at vocab_size - 1 and takes the next
    `num_heads` primes that no earlier search has taken.

    Raises:
        ValueError: a count below 1, max_ngram below 2, or a vocab_size for which the search would take minutes.
    """
    if num_layers < 1 or num_heads < 1 or max_ngram < 2 or not 1 <= vocab_size < _MAX_PRIME:
        raise ValueError(
            f"{num_layers} layers, max_ngram {max_ngram}, vocab_size {vocab_size}, {num_heads} heads: "
            f"expected counts >= 1, max_ngram >= 2, vocab_size < {_MAX_PRIME}"
        )
    taken: set[int] = set()
    layers = []
    for _ in range(num_layers):
        sizes = []
        for _ in range(max_ngram - 1):
            heads = []
            candidate = vocab_size - 1
            for _ in range(num_heads):
                candidate += 1
                while candidate in taken or not _is_prime(candidate):
                    candidate += 1
                taken.add(candidate)
                heads.append(candidate)
            sizes.append(tuple(heads))
        layers.append(tuple(sizes))
    return tuple(layers)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))

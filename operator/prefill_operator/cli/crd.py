"""`prefill-operator crd`: the CRDs that this operator was made with, for `kubectl apply --server-side -f -`."""

import argparse

from prefill_operator.crd import crd_path
from prefill_operator.names import Kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=[str(kind) for kind in Kind], help="only this kind (default: both)")


def cmd_crd(args: argparse.Namespace) -> int:
    kinds = [kind for kind in Kind if args.kind in (None, str(kind))]
    # The files themselves: their comments are for readers.
    print("---\n".join(crd_path(kind).read_text() for kind in kinds), end="")
    return 0

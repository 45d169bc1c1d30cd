"""`prefill-operator <verb>`: one module per verb in cli/, imported only when asked for, so that offline verbs start fast.

Exit codes: 0 ok, 1 no (nothing fits, nothing to do), 2 usage, configuration or a pool that is refused. Errors are one line on
stderr.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from prefill_plan.errors import PrefillError

VERBS = {
    "run": "run the operator until SIGTERM",
    "crd": "print the CustomResourceDefinitions",
    "plan": "show what a pool becomes: EP and memory sums, spares, revision; needs no cluster",
    "spares": "show how many spares an availability takes",
    "render": "print the objects of a pool as YAML; needs no cluster",
    "steps": "show the whole rollout of a pool, step by step; needs no cluster",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. argv None: this process is the command, and SIGTERM ends it."""
    if argv is None:
        # Process 1 of a container ignores what it does not handle: a pod deleted in its first second would live out its grace.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="prefill-operator", description="Operator of prefill engine pools.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        description = summary[0].upper() + summary[1:] + "."
        subparser = verbs.add_parser(verb, help=summary, description=description, allow_abbrev=False)
        if verb == chosen:
            module = importlib.import_module(f"prefill_operator.cli.{verb}")
            module.add_arguments(subparser)
            subparser.set_defaults(command=getattr(module, f"cmd_{verb}"))
    args = parser.parse_args(arguments)
    try:
        return int(args.command(args))
    except PrefillError as error:
        print(f"prefill-operator {args.verb}: {error.message}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

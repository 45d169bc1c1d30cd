"""`prefill-engine <verb>`: one module per verb in cli/, imported only when asked for, so that light verbs stay light.

Exit codes: 0 ok, 1 failed, 2 usage or configuration (serve: the codes of ExitCode). Errors are one line on stderr.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from prefill_plan.errors import PrefillError

VERBS = {
    "serve": "run a prefill engine until SIGTERM",
    "request": "send a prompt to an engine and print what happened, with times",
    "plan": "memory plan: smallest EP that fits a GPU, and why",
    "check": "compare the model with golden data",
    "equivalence": "compare decoder truncation modes mask and compact",
    "make-checkpoint": "write a random checkpoint in the official format",
    "drain": "ask an engine to take no new work and wait until it is empty",
    "kv": "serve a pod's KV sidecar: shared-memory pool, store, peers",
    "directory": "serve the cluster's directory of snapshots and segments",
    "ve": "serve a vision encoder, drain it, ask it, have an image encoded",
    "ve-sweep": "measure a vision encoder alone, over image and batch sizes",
    "ve-balance": "simulate how images spread over vision encoders, by three policies",
    "demo": "a real prefill on this machine, verified by a decode probe",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. argv None: this process is the command, and SIGTERM ends it."""
    if argv is None:
        # Process 1 of a container ignores what it does not handle: a pod deleted in its first second would live out its grace.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="prefill-engine", description="Prefill engine for DeepSeek-V4.1-Flash.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        description = summary[0].upper() + summary[1:] + "."
        subparser = verbs.add_parser(verb, help=summary, description=description, allow_abbrev=False)
        if verb == chosen:
            module = importlib.import_module(f"prefill_engine.cli.{verb.replace('-', '_')}")
            module.add_arguments(subparser)
            subparser.set_defaults(command=getattr(module, f"cmd_{verb.replace('-', '_')}"))
    args = parser.parse_args(arguments)
    try:
        return int(args.command(args))
    except PrefillError as error:
        print(f"prefill-engine {args.verb}: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

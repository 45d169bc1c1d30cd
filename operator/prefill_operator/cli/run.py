"""`prefill-operator run`: the operator itself."""

import argparse

from prefill_operator.cli.pool_file import add_settings_arguments, load_settings_of
from prefill_operator.run import run_operator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)


def cmd_run(args: argparse.Namespace) -> int:
    return run_operator(load_settings_of(args))

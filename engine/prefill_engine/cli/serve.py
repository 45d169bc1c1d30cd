"""`prefill-engine serve`: runs an engine in the foreground until SIGTERM. Its exit codes are those of k8s.md 4.6 (C31)."""

import argparse

from prefill_engine.cli.serving import add_serve_arguments, announce, serve_until_end
from prefill_engine.front.exits import Ending
from prefill_engine.front.rank_process import RANK_ENTRY
from prefill_engine.serve import ServeOptions, run_serve
from prefill_engine.settings import HostIdentity, load_config
from prefill_plan.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serve_arguments(parser, config_name="EngineConfig", entry_option="--rank-entry", entry=RANK_ENTRY)


def cmd_serve(args: argparse.Namespace) -> int:
    def run(config: EngineConfig, identity: HostIdentity) -> Ending:
        options = ServeOptions(
            termination_log=args.termination_log,
            ready_file=args.ready_file,
            rank_entry=args.rank_entry,
            fault=args.fault,
            announce=announce,
        )
        return run_serve(config, identity, options)

    return serve_until_end(args, verb="serve", constants={}, load=load_config, run=run)

"""A rank process: start, load, warm up, serve, stop. Entry point `rank_main`, spawned by the front (rank_process.py).

Every way out ends in an exit code of k8s.md 4.6: an exception is reported to the front as RankFailed first, so that an
out-of-memory stays visible as one. The trap: when the front is gone nobody reads the lanes any more, so a thread watches
the pipe to it and ends the process.
"""

import logging
import os
import threading
from multiprocessing.connection import Connection

import msgspec
import zmq

from prefill_engine.log import setup_logging
from prefill_engine.messages import PushReport, RankArgs
from prefill_engine.rank.build import build_rank
from prefill_engine.rank.courier import Courier
from prefill_engine.rank.data_port import open_data_transport
from prefill_engine.rank.errors_at_exit import InjectedFault, describe_failure, parse_fault
from prefill_engine.rank.lanes import DataLane, EventsLane, RankLanes
from prefill_engine.rank.read_server import ReadServer
from prefill_plan.config import EngineConfig
from prefill_plan.errors import ExitCode, PrefillError

logger = logging.getLogger(__name__)


def rank_main(args_json: bytes, parent_pipe: Connection) -> None:
    """Runs one rank until Stop; never returns, the process exits with an ExitCode."""
    args = msgspec.json.decode(args_json, type=RankArgs)
    setup_logging(level="INFO", constants={"rank": args.dp_rank})
    threading.Thread(target=_end_with_parent, args=(parent_pipe,), name="parent-watch", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lanes = RankLanes(context, socket_dir=args.socket_dir, dp_rank=args.dp_rank)
    rank = _Rank(args, context, lanes)
    code = int(ExitCode.DRAINED)
    try:
        rank.run()
    except Exception as error:
        failure = describe_failure(error, rank=args.dp_rank, phase=rank.phase)
        # Our own errors say all there is to say; a traceback is for what nobody expected.
        logger.error(
            "rank failed",
            extra={"exit_code": failure.exit_code, "phase": rank.phase, "detail": failure.detail},
            exc_info=not isinstance(error, PrefillError),
        )
        lanes.send(failure)
        code = failure.exit_code
    lanes.close()  # waits until the last events are out
    logging.shutdown()
    os._exit(code)


class _Rank:
    """Phases of a rank, in order; `phase` is what a failure is reported with."""

    def __init__(self, args: RankArgs, context: zmq.Context[zmq.Socket[bytes]], lanes: RankLanes) -> None:
        self.phase = "start"
        self._args = args
        self._context = context
        self._lanes = lanes

    def run(self) -> None:
        config = msgspec.json.decode(self._args.config, type=EngineConfig)
        courier = self._open_courier(config)
        reads = ReadServer(courier)
        if courier is not None:
            courier.start(reads.find)
        loop = build_rank(config, rank=self._args.dp_rank, mailbox=self._lanes, reads=reads, enter=self._enter)
        reads.start(DataLane(self._context, socket_dir=self._args.socket_dir, dp_rank=self._args.dp_rank))
        self.phase = "serve"
        loop.run(before_step=lambda: self._raise_fault("serve"))
        reads.stop()
        if courier is not None:
            courier.stop()

    def _open_courier(self, config: EngineConfig) -> Courier | None:
        """The data transport of hand-overs; None if it is turned off. It reports on a socket of its own thread."""
        if config.handoff.data_port < 0:
            return None
        args = self._args
        lanes: list[EventsLane] = []

        def report(message: PushReport) -> None:
            if not lanes:
                lanes.append(EventsLane(self._context, socket_dir=args.socket_dir, dp_rank=args.dp_rank))
            lanes[0].send(message)

        return Courier(
            lambda: open_data_transport(config, dp_rank=args.dp_rank),
            piece_seconds=config.handoff.piece_seconds,
            report=report,
            wake=self._lanes.wake,
        )

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._raise_fault(phase)

    def _raise_fault(self, phase: str) -> None:
        fault = parse_fault(self._args.fault)
        if fault is not None and fault[1] == phase:
            raise InjectedFault(fault[0])


def _end_with_parent(pipe: Connection) -> None:
    """Blocks until the front's end of the pipe closes, however the front went; then ends this process at once."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(int(ExitCode.UNKNOWN))

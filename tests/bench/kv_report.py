"""Runs the KV benches one after the other and writes what they print into one report, with commit, machine and load.

    python tests/bench/kv_report.py [--results FILE]

`make bench-kv` calls it. Goals and what a ratio means are in the benches' own docstrings (C19).
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

BENCHES = ("bench_swap_in.py", "bench_kv_store.py", "bench_kv_reads.py", "bench_kv_transport.py", "bench_kvd.py")


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def header() -> str:
    commit = output_of(["git", "rev-parse", "--short", "HEAD"])
    changes = " with changes" if output_of(["git", "status", "--porcelain", "--", "engine", "tests/bench"]) else ""
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"`make bench-kv`, {time.strftime('%Y-%m-%d')}, commit {commit}{changes}; {os.cpu_count()} x "
        f"{model.partition(':')[2].strip()}, {gib:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}, "
        "one math thread."
    )


def section(name: str) -> str:
    """A bench's output, said on the terminal as well. Raises SystemExit if it fails."""
    load = os.getloadavg()[0]
    print(f"== {name}, load {load:.1f}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name(name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    print(done.stdout, flush=True)
    if done.returncode != 0:
        raise SystemExit(f"{name} ended with exit code {done.returncode}: nothing was written")
    return f"## {name}\n\nLoad before it {load:.1f}.\n\n```\n{done.stdout.strip()}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="file to write; default: the terminal only")
    results = parser.parse_args().results
    sections = [section(name) for name in BENCHES]
    text = "\n".join(("# KV side: benchmarks of one run", "", header(), "", *sections))
    if results is not None:
        results.write_text(text)


if __name__ == "__main__":
    main()

"""Result files of benchmarks that several scripts write: each replaces its own section and leaves the others alone."""

import os
import platform
import subprocess
from pathlib import Path


def machine_line() -> str:
    """Where and of what a figure is: commit, processor, CPUs, load, Linux, Python."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout
    names = [line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return (
        f"commit {commit.strip() or 'unknown'}; {names[0] if names else platform.machine()}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Linux {platform.release()}, Python {platform.python_version()}"
    )


def write_section(path: Path, title: str, lines: list[str], *, heading: str) -> None:
    """Puts `## title` and the lines into a Markdown file, in place of the section of that title or at the end.

    Args:
        heading: first line of the file, if it is new.
    """
    text = path.read_text() if path.exists() else f"# {heading}\n"
    parts = text.split("\n## ")
    section = "\n".join([title, "", *lines]) + "\n"
    for index, part in enumerate(parts[1:], start=1):
        if part.partition("\n")[0] == title:
            parts[index] = section
            break
    else:
        parts.append(section)
    path.write_text("\n\n## ".join(part.strip("\n") for part in parts) + "\n")

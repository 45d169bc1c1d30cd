"""Result files that several benchmarks write: each replaces its own section only."""

from pathlib import Path

from prefill_testing.bench_results import write_section


def test_each_benchmark_replaces_its_own_section(tmp_path: Path) -> None:
    path = tmp_path / "figures.md"
    for title, lines in (("one", ["1"]), ("two", ["| a |", "| --- |"]), ("three", ["3"]), ("two", ["new", "", "2"])):
        write_section(path, title, lines, heading="Figures")
    assert path.read_text() == "# Figures\n\n## one\n\n1\n\n## two\n\nnew\n\n2\n\n## three\n\n3\n"

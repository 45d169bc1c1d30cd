"""Copies crds/*.yaml, the source of truth, into the chart's templates: `python charts/tools/copy_crds.py`. A test compares.

The copies are gated by the value crds.install and carry Helm's keep annotation while crds.keep is set: CRDs in templates are
upgraded with the release, and uninstalling it leaves them, and so all pools, in place (k8s.md 8).
"""

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
TARGET = _ROOT / "charts" / "prefill" / "templates" / "crds"
_METADATA = "\nmetadata:\n"
_KEEP = """  {{- if .Values.crds.keep }}
  annotations: {helm.sh/resource-policy: keep}
  {{- end }}
"""


def sources() -> list[Path]:
    return sorted((_ROOT / "crds").glob("*.yaml"))


def chart_copy(source: Path) -> str:
    """The template made of one CRD.

    Raises:
        ValueError: the file has no plain metadata block, has annotations of its own, or holds template braces.
    """
    text = source.read_text()
    if "{{" in text or text.count(_METADATA) != 1 or "\n  annotations:" in text:
        raise ValueError(f"{source}: expected one `metadata:` without annotations, and no template braces")
    head, rest = text.split(_METADATA)
    copied = f"{{{{- /* A copy of crds/{source.name}, made by charts/tools/copy_crds.py: change that file, then copy. */}}}}\n"
    return copied + "{{- if .Values.crds.install }}\n" + head + _METADATA + _KEEP + rest.rstrip("\n") + "\n{{- end }}\n"


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    for source in sources():
        (TARGET / source.name).write_text(chart_copy(source))


if __name__ == "__main__":
    main()

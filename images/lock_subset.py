"""lock_subset.py LOCK PYPROJECT EXTRA: prints the part of the lock that `prefill[EXTRA]` needs, hashes included.

One lock decides every version; an image must not carry the linters of the development environment. The lock names, for each
package, who asked for it ("# via"), so the subset is what can be reached from the extra's own requirements.
"""

import re
import sys
import tomllib
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(lock: str) -> dict[str, tuple[str, set[str]]]:
    """Name -> (text of the entry, names of the packages that require it)."""
    found = {}
    for text in re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE):
        pin, _, _ = text.partition("==")
        via = re.findall(r"^    #(?: via)?[ ]+(\S+)", text, flags=re.MULTILINE)
        if "==" in text:
            found[normal(pin.partition("[")[0])] = (text, {normal(name) for name in via})
    return found


def subset(lock: str, pyproject: str, extra: str) -> str:
    project = tomllib.loads(pyproject)["project"]
    asked = project["dependencies"] + project["optional-dependencies"][extra]
    wanted = {normal(match[0]) for line in asked if (match := NAME.match(line))}
    packages = entries(lock)
    missing = sorted(wanted - packages.keys())
    if missing:
        raise SystemExit(f"the lock has no {missing}; run `make lock`")
    size = 0
    while size != len(wanted):
        size = len(wanted)
        wanted |= {name for name, (_, via) in packages.items() if via & wanted}
    return "".join(packages[name][0] for name in sorted(wanted))


if __name__ == "__main__":
    lock_path, pyproject_path, extra_name = sys.argv[1:]
    sys.stdout.write(subset(Path(lock_path).read_text(), Path(pyproject_path).read_text(), extra_name))

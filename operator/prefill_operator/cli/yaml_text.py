"""YAML in and out: several documents, and text of several lines as such. PyYAML comes with the Kubernetes client."""

import re
from collections.abc import Iterable
from typing import Any

import yaml  # type: ignore[import-untyped]

from prefill_operator.manifest import Manifest
from prefill_plan.errors import ConfigError


def parse_yaml(text: str, *, source: str) -> list[dict[str, Any]]:
    """The objects of a manifest; empty documents are passed over.

    Raises:
        ConfigError: not YAML, or a document that is no object.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        text = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise ConfigError(f"{source}: not YAML: {text}") from error
    for document in documents:
        if document is not None and not isinstance(document, dict):
            raise ConfigError(f"{source}: expected objects, found {type(document).__name__}")
    return [document for document in documents if document]


def dump_yaml(objects: Iterable[Manifest]) -> str:
    """What `kubectl apply -f -` reads."""
    return "---\n".join(yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=120) for item in objects)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Its own class, since representers belong to one."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        """One object may stand in two places; names for it would only confuse readers."""
        return True


def _represent_text(dumper: Any, text: str) -> Any:
    """PyYAML leaves 06829686 and 12e45678 bare, which kubectl reads as numbers: all that begins like a number is quoted."""
    style = "|" if "\n" in text else "'" if re.match(r"[-+.]?[0-9]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

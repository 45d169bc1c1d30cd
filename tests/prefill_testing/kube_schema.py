"""Kubernetes' own schemas, strict and offline: objects that we render are checked against several versions."""

import functools
from collections.abc import Mapping
from typing import Any

import jsonschema
from kubernetes_validate import utils
from referencing import Registry, Resource

KUBE_VERSIONS = ("1.29.0", "1.36.0", "1.37.0")
"""The oldest the chart accepts, the one of the test clusters, and the newest."""


def check_object(item: Mapping[str, Any], version: str) -> None:
    """Raises jsonschema.ValidationError if the object is none that Kubernetes of this version would take.

    Unknown fields are errors, defaults and rules between fields are not seen. Kinds of CRDs have no schema here
    (FileNotFoundError).
    """
    group, _, group_version = item["apiVersion"].rpartition("/")
    name = "-".join(part for part in (item["kind"].lower(), group.partition(".")[0], group_version) if part)
    schema = Resource.from_contents(_schema(name, version))
    jsonschema.Draft202012Validator(schema.contents, registry=schema @ _definitions(version)).validate(dict(item))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    """Read once per version: kubernetes_validate.validate parses the 2 MB again for every object."""
    return Resource.from_contents(_schema("_definitions", version)) @ Registry()


@functools.cache
def _schema(name: str, version: str) -> Any:
    return utils.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{name}.json", version)

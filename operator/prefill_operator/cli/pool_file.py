"""Reads pools from manifest files as an API server would take them, and the settings of an installation."""

import argparse
import sys
from pathlib import Path
from typing import Any

from prefill_operator.api import Pool, parse_pool
from prefill_operator.cli.yaml_text import parse_yaml
from prefill_operator.crd import load_crd
from prefill_operator.errors import PoolInvalid
from prefill_operator.manifest_check import check_manifest
from prefill_operator.names import API_VERSION, EP_FLOOR_ANNOTATION, Kind
from prefill_operator.plan import EPFloor, PoolPlan, parse_floor, plan_pool
from prefill_operator.settings import OperatorSettings, load_settings
from prefill_plan.errors import ConfigError
from prefill_plan.model_spec import released_model_spec

_HINTS = {
    "security.allowedHostPathPrefixes": "security.allowedHostPathPrefixes=[/DIRECTORY]",
    "security.allowPrivilegedFeatures": "security.allowPrivilegedFeatures=true",
    "autoscaling.prometheus.serverAddress": "prometheusAddress=http://PROMETHEUS:9090",
}
"""Chart value that a refusal names -> the setting behind it, as --set takes it."""


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--file", required=True, metavar="FILE", help="manifest with one or more pools; - reads standard input"
    )
    parser.add_argument(
        "--namespace", default="default", metavar="NAME", help="of pools that name none (default: default)"
    )


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", type=Path, metavar="FILE", help="settings of the operator as YAML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="PART.FIELD=VALUE",
        help="override one setting, e.g. security.allowedHostPathPrefixes=[/mnt/models]",
    )


def load_settings_of(args: argparse.Namespace) -> OperatorSettings:
    return load_settings(args.settings, args.overrides)


def load_pools(args: argparse.Namespace) -> list[Pool]:
    """The pools of a file, checked like the API server does; other objects in it are passed over.

    Raises:
        ConfigError: unreadable file, bad YAML, no pool in it.
        PoolInvalid: a field that the schema or a rule refuses.
    """
    source = "standard input" if args.file == "-" else args.file
    objects = parse_yaml(_read_text(args.file, source), source=source)
    bodies = [body for body in objects if body.get("apiVersion") == API_VERSION]
    if not bodies:
        found = ", ".join(f"{body.get('apiVersion')} {body.get('kind')}" for body in objects) or "nothing"
        raise ConfigError(f"{source}: holds no object of {API_VERSION}, found {found}")
    return [_parse(body, namespace=args.namespace, is_alone=len(bodies) == 1) for body in bodies]


def plan_of(pool: Pool) -> PoolPlan:
    """The plan as the operator makes it, an EP floor in the manifest's annotations included; no node is known."""
    floor: EPFloor | None = parse_floor(pool.annotations.get(EP_FLOOR_ANNOTATION))
    return plan_pool(pool, floor=floor, nodes=None, model=released_model_spec())


def _read_text(file: str, source: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not text: {error}") from error


def explain_refusal(message: str) -> str:
    """With what to do here about a refusal by the settings of an installation, of which a command knows the defaults only."""
    hints = [hint for value, hint in _HINTS.items() if f"chart value {value}" in message]
    return f"{message}; to try it with other settings than the defaults: --set {hints[0]}" if hints else message


def _parse(body: dict[str, Any], *, namespace: str, is_alone: bool) -> Pool:
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        body = {**body, "metadata": {"namespace": namespace, **metadata}}
    try:
        if body.get("kind") in tuple(Kind):
            check_manifest(body, load_crd(Kind(body["kind"])))
        return parse_pool(body)
    except PoolInvalid as fault:
        if is_alone:
            raise
        name = metadata.get("name") if isinstance(metadata, dict) else None
        raise PoolInvalid(f"{body.get('kind')} {name}: {fault.path}", value=fault.value, rule=fault.rule) from fault

"""What the commands say of pools that are refused: which pool, which value, what would do, and how to try other settings."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from prefill_operator.__main__ import main
from prefill_testing.pools import PREFILL_BODY

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "host network": ({"network": {"hostNetwork": True}}, "security.allowPrivilegedFeatures=true"),
    "host path": (
        {"model": {"name": "flash", "revision": "r1", "source": {"hostPath": {"path": "/mnt/a"}}}},
        "security.allowedHostPathPrefixes=[/DIRECTORY]",
    ),
    "KEDA": (
        {
            "autoscaling": {
                "actuator": "KEDA",
                "maxReplicas": 2,
                "metrics": [{"name": "BacklogMillisecondsPerPE", "target": 300}],
            }
        },
        "prometheusAddress=http://PROMETHEUS:9090",
    ),
}


def _pool(name: str = "flash", **spec: Any) -> dict[str, Any]:
    return {**PREFILL_BODY, "metadata": {"name": name}, "spec": {**PREFILL_BODY["spec"], **spec}}


def _write(tmp_path: Path, *bodies: Any) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump_all(bodies))
    return str(path)


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_by_an_installation_says_how_to_try_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spec, setting = REFUSED[name]
    path = _write(tmp_path, _pool(**spec))
    assert main(["render", "-f", path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prefill-operator render: PrefillPool flash: spec.")
    assert error.endswith(f"to try it with other settings than the defaults: --set {setting}\n")
    allowed = setting.replace("/DIRECTORY", "/mnt").replace("PROMETHEUS", "prometheus.monitoring")
    assert main(["render", "-f", path, "--set", allowed]) == 0


def test_fault_of_one_pool_of_several_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", _write(tmp_path, _pool(), _pool("second", replicas=-1))]) == 2
    assert "PrefillPool second: spec.replicas is -1: must be from 0 to 1024" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"gpu": {"memory": "141GB"}}, "([KMGTPE]i|[kMGTPE])?$, e.g. 143771Mi"),
        ({"gpu": {"product": "NVIDIA-RTX-9000"}}, "or use a known one: H100-80, "),
        ({"autoscaling": {"actuator": "HPA", "maxReplicas": 2, "metrics": []}}, "spec.autoscaling.metrics is []: "),
    ],
    ids=["quantity", "product", "list"],
)
def test_refusal_shows_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: dict[str, Any], words: str
) -> None:
    assert main(["plan", "-f", _write(tmp_path, _pool(**spec))]) != 0
    captured = capsys.readouterr()
    assert words in captured.out + captured.err


def test_negative_number_of_pods_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", _write(tmp_path, _pool()), "--pods", "-1"]) == 2
    assert capsys.readouterr().err == "prefill-operator render: --pods -1: must be 0 or more\n"

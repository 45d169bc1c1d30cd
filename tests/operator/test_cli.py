"""`prefill-operator`: offline verbs as a user calls them, their exit codes and one-line errors."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefill_operator.__main__ import VERBS, main
from prefill_operator.cli.yaml_text import dump_yaml
from prefill_testing.kube_schema import check_object
from prefill_testing.pools import EXAMPLES, PREFILL_BODY

ALLOW = ("--set", "security.allowedHostPathPrefixes=[/mnt/models, /3fs]", "--set", "prometheusAddress=http://p:9090")
PROFILES = ("h200", "b200", "gb300", "h20", "laptop", "vepool")


def _write(tmp_path: Path, *bodies: Any) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump_all(bodies))
    return str(path)


def _changed(**spec: Any) -> dict[str, Any]:
    return {**PREFILL_BODY, "spec": {**PREFILL_BODY["spec"], **spec}}


def test_every_verb_has_its_module() -> None:
    folder = Path(sys.modules["prefill_operator.__main__"].__file__ or "").parent / "cli"

    assert {path.stem for path in folder.glob("*.py")} >= set(VERBS)


@pytest.mark.parametrize("profile", PROFILES)
def test_render_prints_objects_that_kubernetes_knows(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", str(EXAMPLES / f"{profile}.yaml"), *ALLOW]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))

    kinds = [item["kind"] for item in objects]
    assert kinds[:3] == ["ConfigMap", "Service", "PodDisruptionBudget"]
    assert kinds[-1] == "Pod"
    for item in objects:
        # Nobody owns what no API server knows.
        assert "ownerReferences" not in item["metadata"]
        if not item["apiVersion"].startswith(("keda.sh", "monitoring.coreos.com")):
            check_object(item, "1.36.0")


@pytest.mark.parametrize("text", ["06829686", "12e45678", "0x1f", "1_000", "0.0.0.0", "-1", "+2", ".5", "10:30"])
def test_text_that_begins_like_a_number_is_quoted(text: str) -> None:
    """kubectl reads 06829686 and 12e45678 as numbers where PyYAML does not; both are possible revisions."""
    assert dump_yaml([{"value": text}]) == f"value: '{text}'\n"


def test_render_reads_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(dict(PREFILL_BODY))))

    assert main(["render", "-f", "-", "--pods", "4"]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    names = [item["metadata"]["name"] for item in objects if item["kind"] == "Pod"]

    # Three and a spare.
    assert [name.rpartition("-")[2] for name in names] == ["1", "2", "3", "4"]


def test_render_takes_the_namespace_of_pools_that_name_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {**PREFILL_BODY, "metadata": {"name": "flash"}}
    main(["render", "-f", _write(tmp_path, body), "--namespace", "prod"])

    assert {item["metadata"]["namespace"] for item in yaml.safe_load_all(capsys.readouterr().out)} == {"prod"}


def test_render_passes_other_objects_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "ckpt"}}

    assert main(["render", "-f", _write(tmp_path, claim, dict(PREFILL_BODY))]) == 0
    assert "PersistentVolumeClaim" not in capsys.readouterr().out


def test_plan_shows_sums_spares_and_revision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", str(EXAMPLES / "h200.yaml"), *ALLOW]) == 0
    text = capsys.readouterr().out

    assert "EP 4, Engram tables in host memory (Planner MinimumEP)" in text
    assert text.count(" GB per GPU, limit 145.60 GB") == 6
    assert "ConfigMap flash-h200-" in text
    assert "replicas are set from outside (KEDA, 8 to 24)" in text
    assert "shortages a year" in text


@pytest.mark.parametrize(("placement", "places"), [("Auto", "gpu host"), ("Host", "host"), ("GPU", "gpu")])
def test_plan_shows_the_sums_of_allowed_engram_places_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], placement: str, places: str
) -> None:
    main(["plan", "-f", _write(tmp_path, _changed(engram={"placement": placement}))])

    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  EP ")]
    assert [row[1:3] for row in rows] == [[ep, place] for ep in ("2", "4", "8") for place in places.split()]


def test_plan_of_the_tiny_model_shows_no_sums_of_the_released_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**PREFILL_BODY["spec"]["model"], "architecture": "test-tiny"}

    assert main(["plan", "-f", _write(tmp_path, _changed(model=model))]) == 0
    text = capsys.readouterr().out
    assert "GB per GPU" not in text
    assert "no sum: architecture test-tiny is not planned" in text


def test_plan_says_that_a_cpu_pool_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", str(EXAMPLES / "laptop.yaml"), *ALLOW]) == 0

    assert "CPU profile" in capsys.readouterr().out


def test_plan_for_machines_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", str(EXAMPLES / "b200.yaml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)

    assert (plan["ep"], plan["engram"], plan["total"], plan["gpus"]) == (2, "Host", 10, 20)
    assert plan["refusal"] == ""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"gpu": {"product": "NVIDIA-H200"}, "expertParallel": {"size": 2}}, "41.35 GB short"),
        ({"gpu": {"product": "NVIDIA-RTX-9000"}}, 'gpu.product "NVIDIA-RTX-9000" is not in the table'),
        (
            {"gpu": {"product": "NVIDIA-H200", "hostMemoryPerNode": "300Gi"}, "expertParallel": {"size": 4}},
            "limit 322.1",
        ),
        (
            {
                "gpu": {"product": "NVIDIA-H200", "hostMemoryPerNode": "1Ti"},
                "kvd": {"enabled": True, "image": "kvd:1", "poolSize": "900Gi"},
            },
            "engine + 983.5 kvd) = ",
        ),
    ],
    ids=["too-small", "unknown", "host-memory", "kvd"],
)
def test_plan_without_a_fit_shows_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: dict[str, Any], words: str
) -> None:
    context = {"context": {"maxTokens": 1_048_576}, "kvCache": {"tokensPerGPU": 2_097_152}}

    assert main(["plan", "-f", _write(tmp_path, _changed(**spec, **context))]) == 1
    assert words in capsys.readouterr().out


def test_plan_warns_of_what_the_cluster_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", _write(tmp_path, _changed(network={"hostNetwork": True}))]) == 1

    assert "refused       spec.network.hostNetwork" in capsys.readouterr().out


def test_plan_and_steps_of_an_autoscaled_pool_have_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """Its replicas are the autoscaler's: what stands in the manifest, the default 1, is what it never has."""
    assert main(["plan", "-f", str(EXAMPLES / "h200.yaml")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  PEs ")]
    assert [row[1:3] for row in rows] == [["8", "+"], ["24", "+"]]
    assert main(["steps", "-f", str(EXAMPLES / "h200.yaml")]) == 0
    assert "rollout of 8 + " in capsys.readouterr().out


def test_plan_says_when_quota_does_not_allow_the_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", _write(tmp_path, _changed(replicas=3, quota={"maxGPUs": 4}))]) == 1

    out = capsys.readouterr().out
    assert "1 of the 3 that are wanted, 4 GPUs, 2 per node, so 1 node or more" in out
    assert "quota.maxGPUs = 4" in out


def test_render_without_a_fit_fails_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", _write(tmp_path, _changed(gpu={"product": "NVIDIA-RTX-9000"}))]) == 2
    captured = capsys.readouterr()

    assert captured.out == ""
    assert captured.err.startswith("prefill-operator render: PrefillPool flash: UnknownGPU: ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not YAML"),
        ("- 1", "expected objects, found list"),
        ("", "holds no object of prefill.dev/v1alpha1, found nothing"),
        ("apiVersion: v1\nkind: Pod", "holds no object of prefill.dev/v1alpha1, found v1 Pod"),
        ("a: b: c", "at line 1, column 5"),
        ("apiVersion: prefill.dev/v1alpha1\nkind: Other\nspec: {}", "kind is 'Other': must be PrefillPool or VEPool"),
        (
            "apiVersion: prefill.dev/v1alpha1\nkind: PrefillPool\nmetadata: {name: a}\n"
            "spec: {model: {}, engine: {image: a}, replica: 1}",
            "is required",
        ),
    ],
    ids=["yaml", "list", "empty", "foreign", "place", "kind", "required"],
)
def test_a_bad_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(content)

    assert main(["plan", "-f", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prefill-operator plan: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_typo_in_a_field_is_refused_with_the_likely_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", _write(tmp_path, _changed(replica=1))]) == 2
    assert "spec.replica: unknown field; did you mean replicas?" in capsys.readouterr().err


def test_a_missing_file_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_a_wrong_setting_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", str(EXAMPLES / "h200.yaml"), "--set", "security.allowEverything=true"]) == 2
    assert "unknown key security.allowEverything" in capsys.readouterr().err


def test_spares_marks_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ep", "2", "--node-mtbf-seconds", "5184000", "--node-recovery-seconds", "43200"]

    assert main(["spares", "--replicas", "16", *options]) == 0
    (answer,) = [line for line in capsys.readouterr().out.splitlines() if "<- reaches 0.999" in line]
    # k8s.md 6.1: 16 PEs at four per node with 12 h of repair.
    assert answer.split()[:4] == ["5", "10", "0.999309", "2.1"]


@pytest.mark.parametrize(
    "options",
    [
        ["--target", "1"],
        ["--restart-seconds", "0"],
        ["--restart-seconds", "inf"],
        ["--gpus-per-node", "2"],
        ["--replicas", "0"],
        ["--absent", "-1"],
    ],
    ids=" ".join,
)
def test_spares_refuses_what_makes_no_sense(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["spares", "--replicas", "4", *options]) == 2
    assert capsys.readouterr().err.startswith(f"prefill-operator spares: {options[0]}")


def test_spares_out_of_reach_are_a_short_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spares", "--replicas", "16", "--node-mtbf-seconds", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()

    assert len(lines) == 12
    assert lines[-1] == "target 0.999 is not reached with up to 256 spares"


def test_crd_prints_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    crds = list(yaml.safe_load_all(capsys.readouterr().out))

    assert [crd["spec"]["names"]["kind"] for crd in crds] == ["PrefillPool", "VEPool"]


def test_crd_prints_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd", "--kind", "VEPool"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["metadata"]["name"] == "vepools.prefill.dev"


def test_offline_verbs_load_neither_kopf_nor_a_client() -> None:
    script = (
        "import sys; from prefill_operator.__main__ import main; main(['spares', '--replicas', '4']); "
        "print([name for name in ('kopf', 'kubernetes', 'aiohttp', 'grpc', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_steps_show_a_rollout_that_keeps_the_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", "-f", str(EXAMPLES / "b200.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()

    # maxSurge 0 and maxUnavailable 2: inside the two spares.
    assert "drain flash-b200-00000000-1 (OldRevision)" in lines[2]
    assert sum("create flash-b200-" in line for line in lines) == 10
    assert lines[-1].endswith("never fewer than 8 Ready, 8 are needed")


def test_steps_show_a_creation_in_the_order_of_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", "-f", str(EXAMPLES / "b200.yaml"), "--create", "--load-seconds", "60"]) == 0
    lines = capsys.readouterr().out.splitlines()

    # maxConcurrentLoads is 4: ten pods in three batches.
    assert [line.split()[0] for line in lines if line.split()[0].endswith("s") and "create" in line] == [
        "0s",
        "60s",
        "120s",
    ]
    assert lines[-1] == "3 steps, the last after 120 s; its loads end 60 s later"


def test_steps_show_a_change_of_the_ep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", "-f", str(EXAMPLES / "gb300.yaml"), "--old-ep", "4"]) == 0
    text = capsys.readouterr().out

    assert "rollout of 4 + 1 spares of EP 2, before EP 4" in text


@pytest.mark.parametrize("verb", ["steps", "render"])
def test_no_steps_without_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "-f", _write(tmp_path, _changed(gpu={"product": "NVIDIA-RTX-9000"}))]) == 2
    assert f"prefill-operator {verb}: PrefillPool flash: UnknownGPU" in capsys.readouterr().err


def test_run_without_a_cluster_fails_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefill_operator", "run", "--set", f"kubeconfig={tmp_path}/none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("prefill-operator run: ")
    assert "Traceback" not in done.stderr

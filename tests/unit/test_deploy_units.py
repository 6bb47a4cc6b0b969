"""The example units: systemd takes them, Kubernetes' schema takes them, and so do our parsers."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import command_lines
import jsonschema
import pytest
import yaml

from sglang_smartgen.config import load_config

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy/systemd"
UNITS = sorted(path for path in SYSTEMD.iterdir() if path.suffix in (".service", ".timer"))
ROLES = ("prefill", "decode", "router")
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
SCHEMA = json.loads((ROOT / "tests/data/kubernetes-1.37.json").read_text())

HARDENING = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "RestrictSUIDSGID": "yes",
    "UMask": "0077",
}
# systemd only warns of a key that it does not know.
KEYS = {
    "Unit": "Description Documentation Wants After StartLimitIntervalSec StartLimitBurst",
    "Timer": "OnActiveSec OnUnitInactiveSec",
    "Install": "WantedBy",
    "Service": "Type User Group EnvironmentFile Environment WorkingDirectory StateDirectory "
    "StateDirectoryMode ExecStart ExecStartPost TimeoutStartSec Restart RestartPreventExitStatus "
    "RestartSec KillMode TimeoutStopSec LimitMEMLOCK LimitNOFILE IPAddressDeny IPAddressAllow "
    "NoNewPrivileges CapabilityBoundingSet AmbientCapabilities ProtectSystem ProtectHome "
    "ProtectClock ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables "
    "ProtectControlGroups PrivateTmp RestrictAddressFamilies RestrictNamespaces RestrictSUIDSGID "
    "LockPersonality SystemCallArchitectures UMask",
}


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Section -> key -> values, in order."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in re.sub(r"\\\n\s*", " ", path.read_text()).splitlines():
        if not line or line[0] in "#;":
            continue
        if line[0] == "[":
            section = line.strip("[]")
            found[section] = {}
            continue
        key, equals, value = line.partition("=")
        assert equals and key.strip() == key, line
        found[section].setdefault(key, []).append(value)
    return found


def settings(name: str) -> dict[str, str]:
    """The variables of an example of an environment file."""
    lines = (SYSTEMD / f"{name}.env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_every_key_is_one_that_systemd_has(path: Path) -> None:
    for section, keys in unit(path).items():
        assert set(keys) <= set(KEYS[section].split()), path


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_takes_them(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text().replace("/opt/smartgen/bin/python", sys.executable)
        for program in ("/usr/bin/curl", "/usr/bin/systemctl"):
            text = text.replace(program, "/bin/true")
        (tmp_path / path.name).write_text(text)
    files = sorted(str(tmp_path / path.name.replace("@.", "@prefill.")) for path in UNITS)
    for file in files:
        if "@" in file:
            Path(file).write_text(Path(file.replace("@prefill.", "@.")).read_text())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_runs_what_our_launcher_takes(role: str) -> None:
    service = unit(SYSTEMD / f"smartgen-{role}.service")["Service"]
    values = settings(role)
    line = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], service["ExecStart"][0])
    python, dash_m, module, *words = shlex.split(line)
    assert python.startswith("/") and dash_m == "-m"
    if role == "router":
        assert module == "sglang_router.launch_router"
        routed = command_lines.check_router(words)
        prefill = settings("prefill")
        url = f"http://{prefill['HOST']}:{prefill['PORT']}"
        assert routed.prefill_urls == [(url, int(prefill["BOOTSTRAP_PORT"]))]
        decode = settings("decode")
        assert routed.decode_urls == [f"http://{decode['HOST']}:{decode['PORT']}"]
    else:
        assert module == "sglang_smartgen.launch_server"
        configs = {"/etc/smartgen/smartgen.json": SYSTEMD / "smartgen.json"}
        args, config = command_lines.check_server(words, configs)
        assert args.disaggregation_mode == role and config is not None
        assert args.host == values["SGLANG_HOST_IP"] and args.enable_metrics
    environment = " ".join(service["Environment"])
    assert "PYTHONSAFEPATH=1" in environment


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_is_fenced_and_has_the_token_only_where_it_needs_it(role: str) -> None:
    service = unit(SYSTEMD / f"smartgen-{role}.service")["Service"]
    for key, value in HARDENING.items():
        assert service[key] == [value], key
    assert service["User"] == ["smartgen"]
    files = [f"/etc/smartgen/{role}.env"]
    if role == "router":
        assert service["EnvironmentFile"] == files
    else:
        assert service["EnvironmentFile"] == [*files, "/etc/smartgen/token.env"]
        assert service["IPAddressDeny"] == ["any"] and service["IPAddressAllow"]
        assert set(settings("token")) == {"SMARTGEN_TOKEN"}
        assert {"MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"} <= set(settings(role))


def test_both_forms_have_the_same_configuration() -> None:
    (document,) = yaml.safe_load_all((ROOT / "deploy/kubernetes/config.yaml").read_text())
    text = document["data"]["smartgen.json"]
    assert load_config(text) == load_config(str(SYSTEMD / "smartgen.json"))


# Kubernetes -------------------------------------------------------------------------------------


DOCUMENTS = [d for path in MANIFESTS for d in yaml.safe_load_all(path.read_text())]


def problems(document: dict[str, Any]) -> list[str]:
    """What Kubernetes' schema says against a document; unknown fields are refused."""
    kind = f"{document['apiVersion']}/{document['kind']}"
    schema = {**SCHEMA["$defs"][kind], "$defs": SCHEMA["$defs"]}
    validator = jsonschema.Draft7Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in DOCUMENTS if d["kind"] == kind}


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}"
)
def test_kubernetes_takes_it(document: dict[str, Any]) -> None:
    assert problems(document) == []


def test_the_schema_finds_a_wrong_field_and_a_wrong_type() -> None:
    node = copy.deepcopy(named("StatefulSet")["smartgen-prefill"])
    node["spec"]["template"]["spec"]["hostNetworking"] = True
    node["spec"]["replicas"] = "one"
    assert len(problems(node)) == 2


def container(name: str) -> dict[str, Any]:
    workloads = {**named("StatefulSet"), **named("Deployment")}
    (found,) = workloads[name]["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pod_runs_what_our_launcher_takes(role: str) -> None:
    node = container(f"smartgen-{role}")
    assert node["command"] == ["python", "-P", "-m", "sglang_smartgen.launch_server"]
    configs = {"/etc/smartgen/smartgen.json": SYSTEMD / "smartgen.json"}
    args, config = command_lines.check_server(node["args"], configs)
    assert args.disaggregation_mode == role and config is not None and args.enable_metrics
    environment = {item["name"]: item for item in node["env"]}
    secret = environment["SMARTGEN_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "smartgen-token", "key": "token"}
    ports = {port["name"]: port["containerPort"] for port in node["ports"]}
    assert ports["http"] == args.port
    assert ports.get("bootstrap", 8998) == args.disaggregation_bootstrap_port or role == "decode"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert node[probe]["httpGet"] == {"path": "/health", "port": "http"}
        assert node[probe]["timeoutSeconds"] >= 30  # SGLang's answer takes up to 20 s
    start = node["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 600
    assert node["resources"]["limits"]["memory"] and node["resources"]["requests"]["memory"]


def test_the_router_names_pods_that_exist() -> None:
    router = container("smartgen-router")
    assert router["command"][-1] == "sglang_router.launch_router"
    routed = command_lines.check_router(router["args"])
    sets = named("StatefulSet")
    for role, urls in (
        ("prefill", [url for url, _ in routed.prefill_urls]),
        ("decode", routed.decode_urls),
    ):
        node = sets[f"smartgen-{role}"]
        service = node["spec"]["serviceName"]
        assert named("Service")[service]["spec"]["clusterIP"] == "None"
        pods = [f"smartgen-{role}-{i}" for i in range(node["spec"]["replicas"])]
        assert urls == [f"http://{pod}.{service}:30000" for pod in pods]


def test_names_and_selectors_fit() -> None:
    for name, node in {**named("StatefulSet"), **named("Deployment")}.items():
        labels = node["spec"]["template"]["metadata"]["labels"]
        assert node["spec"]["selector"]["matchLabels"] == labels, name
        pod = node["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        (inner,) = pod["containers"]
        assert {mount["name"] for mount in inner["volumeMounts"]} == volumes
    for name, service in named("Service").items():
        workload = "smartgen-router" if name == "smartgen" else name
        targets = {port["name"] for port in container(workload)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= targets
    assert named("ConfigMap").keys() == {"smartgen-config"}


def test_nobody_but_the_nodes_reaches_mooncakes_ports() -> None:
    policy = named("NetworkPolicy")["smartgen-nodes"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    environment = {item["name"]: item.get("value") for item in container("smartgen-decode")["env"]}
    low, high = int(environment["MC_MIN_RPC_PORT"]), int(environment["MC_MAX_RPC_PORT"])
    covered = False
    for rule in policy["ingress"]:
        assert rule["from"], "a rule without `from` lets everybody in"
        of_nodes = rule["from"] == [{"podSelector": policy["podSelector"]}]
        for port in rule["ports"]:
            first, last = port["port"], port.get("endPort", port["port"])
            if first <= high and last >= low:
                assert of_nodes, port
                covered |= first <= low and last >= high
    assert covered, "the nodes must reach each other there"

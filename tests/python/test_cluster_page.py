"""What operators are told of clusters: docs/CLUSTER.md can be followed, and the manifest for
Kubernetes agrees with itself and has no field that Kubernetes does not know.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from clusters import eventually, order
from servers import REGION, Etcd, Node, forebay_program, free_port

ROOT = Path(__file__).parents[2]
NAME = "training"


def test_three_nodes_start_as_the_page_for_operators_says(origin, tmp_path):
    page = (ROOT / "docs" / "CLUSTER.md").read_text()
    init = re.search(r"^```sh\n(forebay cluster init .*?)^```$", page, re.S | re.M)[1]
    settings = re.search(r"^```toml\n(.*?)^```$", page, re.S | re.M)[1]
    path = f"{Path(forebay_program()).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-euc", init], cwd=tmp_path, env={"PATH": path}, check=True)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\ntoken = "of-the-operator"\n')
    keys.chmod(0o600)
    nodes = {}
    etcd = Etcd(tmp_path / "etcd")
    try:
        for name in ("node-1", "node-2", "node-3"):
            s3, peer = free_port(), free_port()
            mine = settings
            for said, here in (
                ("0.0.0.0:8080", f"127.0.0.1:{s3}"),
                ("0.0.0.0:8300", f"127.0.0.1:{peer}"),
                ("10.0.0.1:8300", f"127.0.0.1:{peer}"),
                ("10.0.0.9:2379", f"127.0.0.1:{etcd.port}"),
                ('node = "node-1"', f'node = "{name}"'),
                ("/etc/forebay/keys.toml", str(keys)),
                ("/etc/forebay/cluster", str(tmp_path / NAME / name)),
                ("my-bucket", "train"),
                ("eu-central-1", f'{REGION}"\nendpoint = "{origin.url}'),
            ):
                assert said in mine, f"the page does not have {said}"
                mine = mine.replace(said, here)
            file = tmp_path / f"{name}.toml"
            file.write_text(mine)
            nodes[name] = Node(
                "",
                [],
                tmp_path / f"of-{name}",
                listen=f"127.0.0.1:{s3}",
                options=["--config", str(file)],
            )

        def told(node: Node) -> dict | None:
            done = order(node, "status", "--json", FOREBAY_TOKEN="of-the-operator")
            return json.loads(done.stdout) if done.returncode == 0 else None

        for node in nodes.values():
            said = eventually(
                lambda node=node: (t := told(node)) and len(t["members"]) == 3 and t, "3 members"
            )
            assert {m["name"] for m in said["members"]} == set(nodes)
            done = order(node, "status")
            assert done.returncode != 0 and "token" in done.stderr, "with keys it takes one"
    finally:
        for server in (*nodes.values(), etcd):
            server.stop(signal.SIGKILL)


def test_the_manifest_for_kubernetes_is_consistent(tmp_path):
    text = (ROOT / "deploy" / "kubernetes" / "cluster.yaml").read_text()
    objects = list(yaml.safe_load_all(text))
    of_kind = lambda kind: [o for o in objects if o["kind"] == kind]  # noqa: E731
    (pods,), (budget,), (settings,) = map(
        of_kind, ("StatefulSet", "PodDisruptionBudget", "ConfigMap")
    )
    template = pods["spec"]["template"]
    labels = template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    for service in of_kind("Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    (headless,) = (s for s in of_kind("Service") if s["spec"].get("clusterIP") == "None")
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert pods["spec"]["serviceName"] == headless["metadata"]["name"]
    for selector in (pods["spec"]["selector"], budget["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert budget["spec"]["maxUnavailable"] == 1
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports

    # Each volume is there, and mounted once.
    volumes = {v["name"]: v for v in template["spec"]["volumes"]}
    claims = {c["metadata"]["name"] for c in pods["spec"]["volumeClaimTemplates"]}
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert set(mounts) == set(volumes) | claims
    assert volumes["config"]["configMap"]["name"] == settings["metadata"]["name"]
    secrets = {v["secret"]["secretName"] for v in volumes.values() if "secret" in v}
    for secret in secrets:
        for place in (text, (ROOT / "docs" / "CLUSTER.md").read_text()):
            assert f"kubectl create secret generic {secret}" in place

    # The settings are sound, and agree with the rest.
    ((name, config),) = settings["data"].items()
    assert container["args"] == ["serve", "--json", "--config", f"{mounts['config']}/{name}"]
    peer = headless["metadata"]["name"], ports["peer"]
    assert 'map = "dns:{}:{}"'.format(*peer) in config
    for port in ("s3", "admin", "peer"):
        assert f'{port} = "0.0.0.0:{ports[port]}"' in config
    assert f'dirs = ["{mounts["cache"]}:' in config
    command = [forebay_program(), "cluster", "init", NAME, "--node", "pods"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "keys.toml").write_text('[[keys]]\ntoken = "of-the-operator"\n')
    config = config.replace(mounts["cluster"], str(tmp_path / NAME / "pods"))
    config = config.replace(mounts["keys"], str(tmp_path))
    (tmp_path / name).write_text(config)
    env = {"PATH": os.environ["PATH"]}
    for variable in container["env"]:
        value = variable.get("value", "forebay-0")
        env[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], value)
    assert env["FOREBAY__CLUSTER__ADDRESS"] == "forebay-0.{}:{}".format(*peer)
    command = [forebay_program(), "config", "check", "--config", str(tmp_path / name)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    """tests/manifests; after the first time, Go's caches have all but its last step."""
    program = tmp_path_factory.mktemp("manifests") / "manifests"
    build = ["go", "build", "-o", str(program), "."]
    done = subprocess.run(build, cwd=ROOT / "tests/manifests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def decoded(decoder: Path, *files: Path) -> subprocess.CompletedProcess:
    return subprocess.run([decoder, *files], capture_output=True, text=True, timeout=60)


def test_the_manifests_for_kubernetes_have_its_fields_only(decoder):
    files = sorted((ROOT / "deploy" / "kubernetes").glob("*.y*ml"))
    done = decoded(decoder, *files)
    assert done.returncode == 0, done.stdout
    objects = [o for file in files for o in yaml.safe_load_all(file.read_text())]
    assert len(done.stdout.splitlines()) == len(objects) > 0


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("maxUnavailable: 1", "maxUnavailible: 1", 'unknown field "spec.maxUnavailible"'),
        (
            "terminationGracePeriodSeconds: 45",
            "terminationGracePeriod: 45",
            'unknown field "spec.template.spec.terminationGracePeriod"',
        ),
        ("failureThreshold: 6", 'failureThreshold: "6"', "cannot unmarshal string"),
        ("  replicas: 3\n", "  replicas: 3\n  replicas: 4\n", '"replicas" already'),
        ("readOnlyRootFilesystem: true", "readOnlyFilesystem: true", "readOnlyFilesystem"),
        ("apiVersion: apps/v1", "apiVersion: apps/v1beta9", "no kind"),
    ],
)
def test_a_wrong_field_of_a_manifest_is_found(decoder, tmp_path, right, wrong, told):
    text = (ROOT / "deploy" / "kubernetes" / "cluster.yaml").read_text()
    assert text.count(right) == 1
    file = tmp_path / "wrong.yaml"
    file.write_text(text.replace(right, wrong))
    done = decoded(decoder, file)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if ": document " in line]
    assert told in line, line

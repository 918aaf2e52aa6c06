"""examples/submit/kubernetes: the files are valid, and their ports are those of the command in the README."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from spark_elastic.spark.cluster import SESSION_PORTS
from spark_elastic.wire.ports import Ports

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "submit"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / "kubernetes" / name).read_text()))


@pytest.fixture(scope="module")
def conf():
    """Return the Spark settings of the command in the README."""
    part = (FOLDER / "README.md").read_text().partition("\n### With a NetworkPolicy\n")[2]
    words = shlex.split(re.search(r"```sh\n(.*?)```", part, re.DOTALL).group(1).replace("\\\n", " "))
    settings = [after for word, after in itertools.pairwise(words) if word == "--conf"]
    return dict(setting.split("=", 1) for setting in settings)


@pytest.fixture(scope="module")
def policies():
    return {policy["spec"]["podSelector"]["matchLabels"]["part"]: policy for policy in documents("network-policy.yaml")}


@pytest.fixture(scope="module")
def gloo():
    (pod,) = documents("executor-pod.yaml")
    (sysctl,) = pod["spec"]["securityContext"]["sysctls"]
    assert sysctl["name"] == "net.ipv4.ip_local_port_range"
    return Ports(*map(int, sysctl["value"].split()))


def opened(policy) -> set[Ports]:
    (rule,) = policy["spec"]["ingress"]
    assert all(port["protocol"] == "TCP" for port in rule["ports"])
    return {Ports(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}


def test_driver_accepts_its_ports_and_no_others(conf, policies):
    wanted = ("spark.driver.port", "spark.driver.blockManager.port", SESSION_PORTS["driver_port"])
    assert opened(policies["driver"]) == {Ports.parse(conf[name]) for name in wanted}


def test_executors_accept_their_ports_and_no_others(conf, policies, gloo):
    wanted = ("spark.blockManager.port", SESSION_PORTS["agent_ports"])
    assert opened(policies["executor"]) == {gloo, *(Ports.parse(conf[name]) for name in wanted)}


def test_ranges_do_not_overlap(policies):
    for policy in policies.values():
        ranges = sorted(opened(policy))
        assert all(one.last < other.first for one, other in itertools.pairwise(ranges))


def test_agents_have_a_port_for_each_task_of_an_executor(conf):
    tasks = int(conf["spark.executor.cores"]) // int(conf["spark.task.cpus"])
    assert Ports.parse(conf[SESSION_PORTS["agent_ports"]]).size >= tasks


def test_policies_select_the_pods_that_the_command_labels(conf, policies):
    for role, policy in policies.items():
        labels = policy["spec"]["podSelector"]["matchLabels"]
        assert labels == {name: conf[f"spark.kubernetes.{role}.label.{name}"] for name in ("training", "part")}
        assert policy["kind"] == "NetworkPolicy"
        assert policy["metadata"]["namespace"] == conf["spark.kubernetes.namespace"]
    (rule,) = policies["driver"]["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": policies["executor"]["spec"]["podSelector"]}]


def test_service_is_headless_and_leads_to_all_ports_of_the_driver(conf, policies):
    (service,) = documents("driver-service.yaml")
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == policies["driver"]["spec"]["podSelector"]["matchLabels"]
    ports = {port["port"] for port in service["spec"]["ports"]}
    assert ports == {port for of in opened(policies["driver"]) for port in range(of.first, of.last + 1)}
    host = re.search(r"spark\.driver\.host=(\S+?)`", (FOLDER / "README.md").read_text()).group(1)
    assert host == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"


def test_template_exists_where_the_command_looks_for_it(conf):
    template = conf["spark.kubernetes.executor.podTemplateFile"]
    assert (FOLDER.parents[1] / template).is_file()


def test_image_installs_a_torch_that_the_package_accepts():
    dependencies = re.search(r"^dependencies = (.*)$", (FOLDER.parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
    installed = re.findall(r'pip install .*"(torch\b[^"]*)"', (FOLDER / "README.md").read_text())
    assert installed == re.findall(r'"(torch\b[^"]*)"', dependencies[1])

"""Workflows, Dockerfiles and templates, which other machines run, name what is here.

scripts/development/lint_ci.sh reads them with linters of their own.
"""

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import mixhead_plugin

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
names = {"ids": lambda path: path.name}


def jobs(workflow):
    return yaml.safe_load(workflow.read_text())["jobs"]


def steps(workflow):
    return [step for job in jobs(workflow).values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, **names)
def test_a_workflow_calls_the_scripts_of_the_project(workflow):
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for command in commands:
        program = re.sub(r"^[A-Z]+=\S+ ", "", command).split()[0]
        assert program == ".ci/run" or program.startswith("scripts/")
        assert os.access(ROOT / program, os.X_OK), program


@pytest.mark.parametrize("workflow", WORKFLOWS, **names)
def test_a_workflow_pins_each_action_to_a_commit(workflow):
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used
    assert [line for line in used if not re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_the_tests_run_on_the_versions_of_python_that_the_package_names():
    tests = jobs(ROOT / ".github" / "workflows" / "tests.yml")["tests"]
    tried = tests["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    may_fail = re.findall(r"'(3\.\d+)'", tests["continue-on-error"])
    assert tried == [*named, *may_fail]


def test_torch_is_the_pinned_one_wherever_it_is_named():
    pins = (ROOT / "scripts" / "requirements" / "torch.txt").read_text()
    pinned = re.search(r"(?m)^torch==(\S+)", pins)[1]
    named = {}  # file -> the versions in it
    for file in (*WORKFLOWS, *DOCKERFILES):
        versions = set(re.findall(r'TORCH[:=] ?"?([\d.]+)', file.read_text()))
        if versions:
            named[file.name] = versions
    files = ["docs.yml", "release.yml", "tests.yml", "cpu.Dockerfile"]
    assert named == {file: {pinned} for file in files}


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mixhead_plugin.__version__
    assert f"version {mixhead_plugin.__version__}" in (ROOT / "README.md").read_text()


def test_a_report_of_a_fault_asks_for_what_check_says():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "fault.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert "mixhead check --json" in fields["check"]["attributes"]["label"]
    assert fields["check"]["validations"]["required"]

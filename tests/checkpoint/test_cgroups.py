"""Tests of the quota of processors, with fake proc and cgroup files. Memory: test_memory_limit.py."""

import math
import os

import pytest

from hfq.checkpoint.cgroups import cpu_count, cpu_quota

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 28 0:30 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture
def system(tmp_path):
    """system({path: text}) → a folder with these files."""

    def make(files):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return make


def v2(path, **limits):
    files = {f"sys/fs/cgroup{folder.replace('_', '/')}/cpu.max": text for folder, text in limits.items()}
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2} | files


def v1(quota, period="100000"):
    folder = "sys/fs/cgroup/cpu/docker/id"
    return {
        "proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/docker/id\n3:memory:/\n",
        "proc/self/mountinfo": V1,
        f"{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"{folder}/cpu.cfs_period_us": f"{period}\n",
    }


def test_a_machine_without_cgroups_has_no_quota(system):
    assert cpu_quota(system({})) is None


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_a_quota_of_version_2(text, quota, system):
    assert cpu_quota(system(v2("/a", _a=text))) == quota


@pytest.mark.parametrize(("quota", "expected"), [("50000", 0.5), ("400000", 4), ("-1", None)])
def test_a_quota_of_version_1(quota, expected, system):
    assert cpu_quota(system(v1(quota))) == expected


def test_the_least_quota_above_this_process_counts(system):
    files = v2("/a/b", _a="200000 100000", _a_b="max 100000", _c="100000 100000")
    assert cpu_quota(system(files)) == 2
    assert cpu_quota(system(v2("/a/b", _a_b="50000 100000"))) == 0.5


@pytest.mark.parametrize("text", ["0 100000", "100000 0", "100000", "a b", "1 2 3"])
def test_files_of_another_form_are_ignored(text, system):
    assert cpu_quota(system(v2("/a", _a=text))) is None


@pytest.mark.parametrize(("quota", "count"), [("-1", 6), ("150000", 2), ("800000", 6)])
def test_processors_are_those_of_affinity_and_quota(quota, count, system, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    assert cpu_count(system(v1(quota))) == count


def test_this_machine_tells():
    quota = cpu_quota()
    assert quota is None or quota > 0
    assert 1 <= cpu_count() <= (math.inf if quota is None else math.ceil(quota))

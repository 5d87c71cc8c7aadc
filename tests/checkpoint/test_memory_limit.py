"""Tests of the available memory, with fake proc and cgroup files."""

import pytest

from hfq.checkpoint.memory_limit import available_memory, cgroup_limit

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 28 0:30 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"


@pytest.fixture
def system(tmp_path):
    """system({path: text}) → a folder with these files, and a machine with 100 GiB available."""

    def make(files):
        files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {100 << 20} kB\n"} | files
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return make


def v2(folder, limit, usage, stat=""):
    place = f"sys/fs/cgroup{folder}"
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{usage}\n",
        f"{place}/memory.stat": stat,
    }


def v1(folder, limit, usage, stat=""):
    place = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{usage}\n",
        f"{place}/memory.stat": stat,
    }


def test_a_machine_without_cgroups_has_what_it_says(system):
    assert available_memory(system({})) == 100 * GIB


def test_a_system_that_tells_nothing_is_unknown(tmp_path):
    assert available_memory(tmp_path) is None


def test_a_limit_of_version_2_counts_with_the_page_cache_as_available(system):
    own = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2}
    stat = f"anon 5\ninactive_file {GIB}\nactive_file {GIB // 2}\n"
    assert available_memory(system(own | v2("", 4 * GIB, 3 * GIB, stat))) == 5 * GIB // 2


def test_a_limit_of_version_1(system):
    own = {"proc/self/cgroup": "4:cpu:/x\n3:memory:/docker/id\n", "proc/self/mountinfo": V1}
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\n"
    assert available_memory(system(own | v1("/docker/id", 8 * GIB, 3 * GIB, stat))) == 6 * GIB


def test_in_a_container_the_mount_begins_at_its_own_cgroup(system):
    mount = V1.replace(" / /sys", " /docker/id /sys")
    own = {"proc/self/cgroup": "3:cpu,memory:/docker/id\n", "proc/self/mountinfo": mount}
    assert available_memory(system(own | v1("", 2 * GIB, GIB))) == GIB


@pytest.mark.parametrize("limited", ["", "/a", "/a/b"])
def test_every_cgroup_above_counts(system, limited):
    own = {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2}
    files = {}
    for folder in ("", "/a", "/a/b"):
        files |= v2(folder, 3 * GIB if folder == limited else "max", GIB)
    assert available_memory(system(own | files)) == 2 * GIB


def test_no_limit_and_more_use_than_the_limit(system):
    own = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2}
    assert available_memory(system(own | v2("", "max", GIB))) == 100 * GIB
    assert available_memory(system(own | v2("", GIB, 2 * GIB))) == 0


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "0::", "a b c - d\n", "1 2 3 4 5 - cgroup2 x y\n"])
def test_files_of_another_form_are_ignored(system, text):
    own = {"proc/self/cgroup": text or "0::/", "proc/self/mountinfo": text}
    assert available_memory(system(own)) == 100 * GIB


def test_this_machine_tells():
    assert 0 < available_memory() < 1 << 50


def test_the_limit_is_the_least_below_the_memory_of_the_machine(system):
    own = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": V2,
        "proc/meminfo": f"MemTotal: {8 << 20} kB\n",
    }
    assert cgroup_limit(system(own | v2("", 3 * GIB, GIB) | v2("/a", 2 * GIB, GIB))) == 2 * GIB
    assert cgroup_limit(system({})) is None


def test_a_limit_above_the_memory_of_the_machine_is_none(system):
    own = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2,
        "proc/meminfo": f"MemTotal: {8 << 20} kB\n",
    }
    assert cgroup_limit(system(own | v2("", 9 * GIB, GIB))) is None


def test_a_cgroup_whose_name_begins_like_that_of_the_mount_is_not_below_it(system):
    mount = V1.replace(" / /sys", " /docker/id /sys")
    own = {"proc/self/cgroup": "3:memory:/docker/id2\n", "proc/self/mountinfo": mount}
    assert available_memory(system(own | v1("", 2 * GIB, GIB) | v1("/2", GIB, GIB))) == GIB

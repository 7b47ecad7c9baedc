"""Open files, durability: asked of the real machine, in a process of its own where they change the process."""

import os
import resource
import subprocess
import sys
import textwrap

import pytest

from mlxkv.core.platform import (
    default_cache_dir,
    machine_description,
    macos_of,
    macos_version,
    physical_bytes,
    process_is_alive,
    sync_file,
    sync_file_fully,
)


def run(code: str, **environment: str) -> str:
    """What a new Python process prints for `code`."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def may_raise_a_hard_limit() -> bool:
    """Whether this user may: root, unless a container took the right away."""
    printed = run(
        """
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, soft - 1))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except ValueError:
            print("no")
        """
    )
    return printed != "no"


LIMITS = """
    import os, resource
    from mlxkv.core.platform import keep_open_files_limit, open_files_limit, raise_open_files_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, {before})
    if {drop_root} and os.geteuid() == 0:
        os.setuid(65534)
    with keep_open_files_limit() as before:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))  # what `import mlx_lm` does
    print(*before, *open_files_limit())
"""


@pytest.mark.parametrize(
    ("before", "after"), [((1024, 20000), (8192, 20000)), ((10000, 20000), (10000, 20000)), ((300, 5000), (5000, 5000))]
)
def test_who_may_gets_the_hard_limit_back_and_never_a_lower_soft_one(before, after):
    if not may_raise_a_hard_limit():
        pytest.skip("this user may not raise a hard limit again")
    assert run(LIMITS.format(before=before, drop_root=False)) == " ".join(map(str, before + after))


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="the hard limit is lower already")
def test_others_keep_as_many_open_files_as_they_still_may():
    assert run(LIMITS.format(before=(1024, 4096), drop_root=True)) == "1024 4096 4096 4096"


def test_the_limit_is_put_back_when_the_body_fails():
    printed = run(
        """
        import resource
        from mlxkv.core.platform import keep_open_files_limit, open_files_limit
        before = open_files_limit()
        try:
            with keep_open_files_limit():
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
                raise ImportError("no mlx_lm")
        except ImportError:
            print(open_files_limit().soft >= before.soft)
        """
    )
    assert printed == "True"


def test_raising_the_limit_stops_at_the_hard_one():
    printed = run(
        """
        import resource
        from mlxkv.core.platform import raise_open_files_limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
        print(*raise_open_files_limit(300), *raise_open_files_limit(10**6), *raise_open_files_limit(10))
        """
    )
    assert printed == "300 512 512 512 512 512"


@pytest.mark.skipif(sys.platform != "linux", reason="the rule of other desktops")
def test_the_default_cache_root_follows_the_users_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "mlxkv" / "blocks"


def test_the_machine_is_described_in_one_line():
    machine = machine_description()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_bytes > 2**28
    assert "\n" not in str(machine)
    assert f"{machine.cores} cores" in str(machine)


@pytest.mark.parametrize("sync", [sync_file, sync_file_fully])
def test_syncing_leaves_the_bytes_and_a_closed_file_is_an_error(sync, tmp_path):
    path = tmp_path / "block"
    with open(path, "wb", buffering=0) as file:
        file.write(b"kv")
        sync(file.fileno())
        closed = file.fileno()
    assert path.read_bytes() == b"kv"
    with pytest.raises(OSError, match="Bad file descriptor"):
        sync(closed)


def test_a_hole_takes_no_room_and_written_bytes_do(tmp_path):
    hole, full = tmp_path / "hole", tmp_path / "full"
    with open(hole, "wb") as file:
        file.truncate(2**20)
    full.write_bytes(os.urandom(2**20))
    with open(full, "rb") as file:
        os.fsync(file.fileno())  # some file systems count blocks only then
    assert physical_bytes(hole.stat()) < 2**20
    assert physical_bytes(full.stat()) >= 2**20


def test_a_process_is_alive_until_it_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_is_alive(child.pid)
    child.communicate(b"\n")
    assert not process_is_alive(child.pid)


@pytest.mark.parametrize(
    ("pid", "alive"),
    [(1, True), (os.getpid(), True), (0, False), (-1, False), (2**70, False)],
    ids=["init", "this", "zero", "negative", "huge"],  # one name in every worker
)
def test_a_number_that_is_no_process_is_not_alive(pid, alive):
    assert process_is_alive(pid) is alive


@pytest.mark.parametrize(
    ("told", "darwin", "version"),
    [
        ("15.5", "24.5.0", "15.5"),
        ("26.1", "25.1.0", "26.1"),
        ("16.0", "25.0.0", "26"),
        ("10.16", "20.6.0", "11"),
        ("10.16", "24.6.0", "15"),
        ("", "23.1.0", "14"),
        ("", "27.0.0", "27"),
        ("16.0", "27.1.0", "27"),
        ("17.0", "28.0.0", "28"),
        ("", "", None),
        ("", "19.6.0", None),
        ("junk", "junk", None),
    ],
)
def test_the_version_of_macos_comes_from_the_kernel_where_python_is_told_another(told, darwin, version):
    assert macos_of(told, darwin) == version


def test_a_version_of_macos_is_only_told_on_a_mac():
    assert (macos_version() is None) == (sys.platform != "darwin")

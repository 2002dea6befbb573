"""The machine that this runs on: interpreter, compiler, memory, shared memory, limits, versions."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import sys
from importlib import metadata
from pathlib import Path

from collm_tools.doctor.finding import Finding, note, ok, wrong

PYTHONS = ((3, 11), (3, 12))
MIB, GIB = 1 << 20, 1 << 30
ENOUGH_MEMORY, ENOUGH_SHARED, ENOUGH_FILES = 4 * GIB, 256 * MIB, 4096
SHOWN = ("torch", "transformers", "peft", "redis", "aiohttp", "msgspec")


def look() -> list[Finding]:
    """All of it; a second at the most."""
    return [python(sys.version_info[:2]), compiler(), memory(), sealed_memory(), shared_memory(), files(), versions()]


def python(version: tuple[int, int]) -> Finding:
    """The interpreter's version against those that are tested."""
    said, *tests = (".".join(map(str, each)) for each in (version, *PYTHONS))
    tested = " and ".join(tests)
    if version < PYTHONS[0]:
        return wrong("python", said, f"CoLLM needs {tested}")
    return ok("python", said) if version in PYTHONS else note("python", said, f"tested are {tested}")


def compiler() -> Finding:
    """Triton compiles a little C for the first GPU step."""
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return ok("compiler", found)
    return note("compiler", "no C compiler", "install gcc: fused kernels on a GPU need one")


def memory(path: Path = Path("/proc/meminfo")) -> Finding:
    """What is available, with the processors that may be used."""
    try:
        rows = dict(line.split(":", 1) for line in path.read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError) as error:
        return note("memory", f"{path} cannot be read: {error!r}", "Linux has it")
    said = f"{free / GIB:.1f} GiB available, {len(os.sched_getaffinity(0))} processors"
    low = f"each replica takes the model in float32 and about 1 GiB; {ENOUGH_MEMORY // GIB} GiB carry the demo"
    return ok("memory", said) if free >= ENOUGH_MEMORY else note("memory", said, low)


def sealed_memory() -> Finding:
    """On a CPU, weights lie in a memory file that is sealed once it is filled."""
    try:
        fd = os.memfd_create("collm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
            os.pwrite(fd, b"x", 0)
        finally:
            os.close(fd)
    except PermissionError:
        return ok("sealed memory", "a sealed memory file cannot be written to")
    except (OSError, AttributeError) as error:
        return wrong("sealed memory", f"{error}", "replicas on a CPU need memfd_create with seals: Linux, no gVisor")
    return wrong("sealed memory", "a sealed memory file was written to", "use a Linux kernel that honours seals")


def shared_memory(path: str = "/dev/shm") -> Finding:
    """A container has 64 MiB of it unless more is asked for."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return note("shared memory", f"{path}: {error.strerror}", "mount a tmpfs there")
    size = status.f_blocks * status.f_frsize
    said = f"{path} has {size / MIB:,.0f} MiB"
    more = "docker: --shm-size 1g or shm_size; Kubernetes: replica.sharedMemory of the chart"
    return ok("shared memory", said) if size >= ENOUGH_SHARED else note("shared memory", said, more)


def files() -> Finding:
    """Each client of the dispatcher is an open file."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    said = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} may be open"
    few = soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES
    return note("files", said, f"ulimit -n {ENOUGH_FILES}, where the dispatcher runs") if few else ok("files", said)


def versions() -> Finding:
    """Of what is installed here; replicas alone need torch."""
    found = []
    for name in SHOWN:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ok("versions", ", ".join(found))

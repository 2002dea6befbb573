"""NVIDIA GPUs and their Multi-Process Service, as the driver's own tools tell of them."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys

from collm_tools.doctor.finding import Finding, note, ok, wrong

FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used", "compute_mode", "mig.mode.current")
SMI, CONTROL = "nvidia-smi", "nvidia-cuda-mps-control"
ASK_S = 20.0
TORCH = "import torch as t; print(t.__version__, t.version.cuda, t.cuda.is_available(), t.cuda.device_count())"
BUSY = 0.5


def look() -> list[Finding]:
    """Nothing but a line where there is no driver; else up to twenty seconds for each question."""
    if shutil.which(SMI) is None:
        return [ok("gpu", f"no {SMI}: replicas compute on the CPU")]
    status, said = _ask(SMI, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    if status:
        return [wrong("gpu", said, "the driver does not answer; containers need the NVIDIA container toolkit")]
    daemon = _ask(CONTROL, given="get_server_list\n") if shutil.which(CONTROL) else (127, "")
    return [*devices(said, mps_runs=daemon[0] == 0), mps(*daemon), torch(*_ask(sys.executable, "-c", TORCH))]


def devices(table: str, mps_runs: bool) -> list[Finding]:
    """One finding a GPU, from FIELDS as comma-separated lines (memory in MiB)."""
    found = []
    for row in csv.reader(io.StringIO(table), skipinitialspace=True):
        if len(row) != len(FIELDS):
            found.append(wrong("gpu", f"{SMI} said {','.join(row)!r}", "a GPU that is in trouble: see dmesg for Xid"))
            continue
        found.append(_device(dict(zip(FIELDS, row, strict=True)), mps_runs))
    return found or [wrong("gpu", f"{SMI} names no GPU", "give the container a GPU (--gpus all, nvidia.com/gpu)")]


def _device(row: dict[str, str], mps_runs: bool) -> Finding:
    what, mode = f"gpu {row['index']}", row["compute_mode"].lower()
    total, used = (float(row[name]) if row[name].isdecimal() else 0.0 for name in ("memory.total", "memory.used"))
    said = f"{row['name']}, driver {row['driver_version']}, {used:,.0f} of {total:,.0f} MiB used, mode {mode}"
    if mode == "prohibited":
        return wrong(what, said, f"nvidia-smi -i {row['index']} -c DEFAULT lets processes compute on it")
    if mode.startswith("exclusive") and not mps_runs:
        remedy = f"a replica's two processes share a GPU: nvidia-smi -i {row['index']} -c DEFAULT, or run MPS"
        return wrong(what, said, remedy)
    if row["mig.mode.current"] == "Enabled":
        return note(what, f"{said}, MIG on", "give each replica one instance; CUDA IPC and MPS work inside it alone")
    if total and used / total > BUSY:
        return note(what, said, "another process has most of it: see nvidia-smi")
    return ok(what, said)


def mps(status: int, said: str) -> Finding:
    """What the control daemon answered; 127 if there is none to ask."""
    if status == 127:
        without = "processes take turns on the GPU; containers get it by NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return note("mps", f"no {CONTROL}", without)
    if status:
        return ok("mps", "can be started; COLLM_REPLICA_MPS=true makes a replica start its own")
    return ok("mps", f"a daemon runs, {len(said.split())} servers; leave COLLM_REPLICA_MPS off beside it")


def torch(status: int, said: str) -> Finding:
    """What TORCH printed."""
    if status:
        return note("torch", said.splitlines()[-1] if said else "it does not start", "replicas on this machine need it")
    version, cuda, available, count = said.split()
    if available != "True":
        remedy = "install a torch for CUDA" if cuda == "None" else f"the driver is too old for CUDA {cuda}"
        return wrong("torch", f"{version} finds no GPU", remedy)
    return ok("torch", f"{version}, CUDA {cuda}, {count} GPUs")


def _ask(*command: str, given: str = "") -> tuple[int, str]:
    """Exit status and what was said; 1 with the reason if it does not answer."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip()

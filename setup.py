from setuptools import find_packages, setup

# fbgemm-gpu and fbgemm-gpu-cpu share one import name, so they are extras: never both, never a hard dependency.
# fbgemm 1.X is ABI-locked to torch 2.(X+5); `dlrm-autoshard doctor` checks the pair.
setup(
    name="dlrm_autoshard",
    version="0.1.0",
    description="A torch.distributed DLRM trainer that places, measures and moves its embedding tables",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["dlrm_autoshard", "dlrm_autoshard.*"]),
    package_data={
        "dlrm_autoshard": ["**/*.pyi", "**/*.npz", "**/*.json", "**/*.html", "**/*.css", "**/*.js", "**/*.md"]
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
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "fbgemm-gpu-cpu==1.8.0"],
        "cuda": ["torch==2.13.0", "fbgemm-gpu==1.8.0"],
        "tensorboard": ["tensorboard"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "types-PyYAML", "pandas", "pandas-stubs"],
    },
    entry_points={"console_scripts": ["dlrm-autoshard=dlrm_autoshard.commands.main:main"]},
)

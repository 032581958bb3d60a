"""Packaging: `pip install -c constraints.txt -e .` for users, `.[dev]` for those who build it."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

setup(
    name="flextrain",
    version="0.1.0",
    description="Trains language models on machines that may vanish: a Metaflow pipeline for spot nodes",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"": "src"},
    packages=find_namespace_packages("src", include=["flextrain*", "metaflow_extensions*"]),
    package_data={"flextrain": ["py.typed"]},
    install_requires=[
        "boto3>=1.35",
        "datasets>=3.0",
        "metaflow>=2.19.20",
        "numpy>=1.26",
        "obstore>=0.9",
        "pydantic>=2.9",
        "pyyaml>=6.0",
        "safetensors>=0.4.3",
        "tokenizers>=0.21",
        "torch>=2.11",
        "tqdm>=4.66",
        "transformers>=4.57",
        "wandb>=0.19",
        "xxhash>=3.4",
    ],
    extras_require={
        "benchmarks": ["accelerate>=1.1"],
        "kubernetes": ["kubernetes>=30.0"],
        "dev": [
            "hypothesis>=6.100",
            "jsonschema>=4.20",
            "moto[server]>=5.0",
            "mypy>=1.13",
            "pytest>=8.0",
            "ruff>=0.8",
            "types-PyYAML",
            "types-tqdm",
        ],
    },
    entry_points={"console_scripts": ["flextrain = flextrain.cli.main:main"]},
)

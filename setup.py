"""The packages of the wheel. Two have their files at the top of the checkout, as package data."""

from setuptools import find_packages, setup

ELSEWHERE = {"dlrm.configs": "configs", "dlrm.examples": "examples"}

setup(
    packages=[*find_packages(include=["dlrm", "dlrm.*"]), *ELSEWHERE],
    package_dir=ELSEWHERE,
    package_data={
        "dlrm": ["py.typed", "config/options.json", "data/synthetic/*.json"],
        **{name: ["*.*"] for name in ELSEWHERE},
    },
)

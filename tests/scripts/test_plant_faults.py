"""The faults that plant_faults.py plants are those of the code as it is."""


def test_every_fault_can_be_planted(run):
    assert run("plant_faults", "check").stdout.endswith("faults can be planted\n")


def test_a_fault_whose_code_is_gone_is_named(run, tmp_path):
    error = run("plant_faults", "check", "--tree", tmp_path, status=2).stderr
    assert "clipping-scales-up: dlrm/training/step.py does not exist\n" in error
    assert error.endswith("correct faults.yaml\n")

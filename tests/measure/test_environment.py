import json

import torch

from autoprec.measure import describe_environment


def test_the_environment_names_this_machine():
    environment = describe_environment()
    assert environment.torch == torch.__version__
    assert environment.threads == torch.get_num_threads()
    assert environment.cores >= 1
    assert environment.device == environment.cpu != ""
    assert environment.device_kind == "cpu"
    assert json.loads(json.dumps(environment.to_json()))["python"].startswith("3.")

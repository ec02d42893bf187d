"""Names of `accelerate.test_utils`: what tests of training scripts need."""

from headway.compat.forwarding import forward
from headway.compat.test_utils.testing import (
    DEFAULT_LAUNCH_COMMAND as DEFAULT_LAUNCH_COMMAND,
    are_the_same_tensors as are_the_same_tensors,
    assert_exception as assert_exception,
    device_count as device_count,
    execute_subprocess_async as execute_subprocess_async,
    get_launch_command as get_launch_command,
    require_cpu as require_cpu,
    require_cuda as require_cuda,
    require_mps as require_mps,
    require_multi_device as require_multi_device,
    require_multi_gpu as require_multi_gpu,
    require_non_cpu as require_non_cpu,
    require_single_device as require_single_device,
    require_single_gpu as require_single_gpu,
    slow as slow,
    torch_device as torch_device,
)
from headway.compat.test_utils.training import (
    RegressionDataset as RegressionDataset,
    RegressionModel as RegressionModel,
)

__getattr__, __dir__ = forward(__name__)

"""Names of `accelerate.test_utils`: what tests of training scripts need."""

from headway.compat.forwarding import forward
from headway.compat.test_utils.testing import (
    DEFAULT_LAUNCH_COMMAND as DEFAULT_LAUNCH_COMMAND,
)
from headway.compat.test_utils.testing import (
    are_the_same_tensors as are_the_same_tensors,
)
from headway.compat.test_utils.testing import (
    assert_exception as assert_exception,
)
from headway.compat.test_utils.testing import (
    device_count as device_count,
)
from headway.compat.test_utils.testing import (
    execute_subprocess_async as execute_subprocess_async,
)
from headway.compat.test_utils.testing import (
    get_launch_command as get_launch_command,
)
from headway.compat.test_utils.testing import (
    require_cpu as require_cpu,
)
from headway.compat.test_utils.testing import (
    require_cuda as require_cuda,
)
from headway.compat.test_utils.testing import (
    require_mps as require_mps,
)
from headway.compat.test_utils.testing import (
    require_multi_device as require_multi_device,
)
from headway.compat.test_utils.testing import (
    require_multi_gpu as require_multi_gpu,
)
from headway.compat.test_utils.testing import (
    require_non_cpu as require_non_cpu,
)
from headway.compat.test_utils.testing import (
    require_single_device as require_single_device,
)
from headway.compat.test_utils.testing import (
    require_single_gpu as require_single_gpu,
)
from headway.compat.test_utils.testing import (
    slow as slow,
)
from headway.compat.test_utils.testing import (
    torch_device as torch_device,
)
from headway.compat.test_utils.training import (
    RegressionDataset as RegressionDataset,
)
from headway.compat.test_utils.training import (
    RegressionModel as RegressionModel,
)

__getattr__, __dir__ = forward(__name__)

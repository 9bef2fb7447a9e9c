from megatron_packed.config.environment_variables import apply_environment as apply_environment
from megatron_packed.config.errors import (
    ConfigError as ConfigError,
)
from megatron_packed.config.errors import (
    Problem as Problem,
)
from megatron_packed.config.options import option as option
from megatron_packed.config.parallel_layout import ParallelLayout as ParallelLayout
from megatron_packed.config.parser.parse import (
    parse as parse,
)
from megatron_packed.config.parser.parse import (
    parse_or_exit as parse_or_exit,
)
from megatron_packed.config.run import RunConfig as RunConfig
from megatron_packed.config.section import Section as Section
from megatron_packed.config.serialise import (
    from_dict as from_dict,
)
from megatron_packed.config.serialise import (
    model_differences as model_differences,
)
from megatron_packed.config.serialise import (
    model_hash as model_hash,
)
from megatron_packed.config.serialise import (
    to_dict as to_dict,
)

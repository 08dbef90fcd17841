from . import torchrec as torchrec
from .autoshard.autoshard import Autoshard as Autoshard
from .costs import RankCost as RankCost
from .costs import StepProfile as StepProfile
from .data.batch import Batch as Batch
from .data.resolve_tables import TableRows as TableRows
from .data.resolve_tables import resolve_tables as resolve_tables
from .distributed.bags import ShardedEmbeddingBags as ShardedEmbeddingBags
from .distributed.tables.optimizers import SGD as SGD
from .distributed.tables.optimizers import Adagrad as Adagrad
from .distributed.tables.optimizers import Adam as Adam
from .distributed.tables.optimizers import RowwiseAdagrad as RowwiseAdagrad
from .model.dlrm import DenseArch as DenseArch
from .plan import Constraints as Constraints
from .plan import PlanError as PlanError
from .plan import ShardingPlan as ShardingPlan
from .plan import Topology as Topology
from .planner.costs.replay import CommsSample as CommsSample
from .planner.costs.replay import ShardSample as ShardSample
from .planner.planner import Planner as Planner
from .planner.result import PlanResult as PlanResult
from .planner.task import PlacementTask as PlacementTask
from .probe.simulator import SimulatedCluster as SimulatedCluster
from .tables import TableConfig as TableConfig
from .tables import TableStats as TableStats

__version__: str

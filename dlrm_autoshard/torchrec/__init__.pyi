from .autoshard import Autoshard as Autoshard
from .plan import plan as plan
from .tables import TorchrecError as TorchrecError

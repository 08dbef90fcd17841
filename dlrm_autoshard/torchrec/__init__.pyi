from .autoshard import Autoshard as Autoshard
from .module_file import save_modules as save_modules
from .plan import plan as plan
from .tables import TorchrecError as TorchrecError

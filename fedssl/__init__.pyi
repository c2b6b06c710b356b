from fedssl import embedding as embedding
from fedssl import encoders as encoders
from fedssl import evaluation as evaluation
from fedssl import export as export
from fedssl import losses as losses
from fedssl import partition as partition
from fedssl.api import Composed as Composed
from fedssl.api import Run as Run
from fedssl.api import compose as compose
from fedssl.api import load as load
from fedssl.api import run as run
from fedssl.errors import InputError as InputError
from fedssl.errors import RunError as RunError

__version__: str

"""torch's private API, one file per area of torch, so that a new version of torch breaks lowtide here or nowhere.

No other package of lowtide may import or name a private torch attribute; tests/test_package.py enforces it. Every
docstring ends with the private API that it relies on, or with the change of torch that would make it obsolete, and
every function has a canary test in tests/_compat/test_<area>.py. A name that torch has removed is replaced by a
placeholder that raises `LowtideError` when the feature that needs it is used (see `internals`), so that
`import lowtide` and all other features keep working.

The other packages use the names of all these files as `_compat.version_of(tensor)`. A few names that one module needs
are imported from their file.
"""

from lowtide._compat.autograd import *
from lowtide._compat.cuda_allocator import *
from lowtide._compat.dispatch import *
from lowtide._compat.distributed import *
from lowtide._compat.dynamo import *
from lowtide._compat.fake_tensors import *
from lowtide._compat.fx_graphs import *
from lowtide._compat.modules import *
from lowtide._compat.profiler import *
from lowtide._compat.tensors import *

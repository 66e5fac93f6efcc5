"""A call or more for every row of the catalog."""

from tests.ops.case import Case
from tests.ops.catalog_calls.along import ALONG
from tests.ops.catalog_calls.elementwise import ELEMENTWISE
from tests.ops.catalog_calls.factories import FACTORIES
from tests.ops.catalog_calls.indices import INDICES
from tests.ops.catalog_calls.layers import LAYERS
from tests.ops.catalog_calls.losses import LOSSES
from tests.ops.catalog_calls.products import PRODUCTS
from tests.ops.catalog_calls.views import VIEWS

CASES: list[Case] = [
    *ELEMENTWISE,
    *PRODUCTS,
    *VIEWS,
    *ALONG,
    *LAYERS,
    *LOSSES,
    *INDICES,
    *FACTORIES,
]

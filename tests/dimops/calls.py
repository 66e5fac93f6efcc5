"""A call or more for every row of the catalog."""

from tests.dimops.case import Case
from tests.dimops.catalog_calls.along import ALONG
from tests.dimops.catalog_calls.elementwise import ELEMENTWISE
from tests.dimops.catalog_calls.factories import FACTORIES
from tests.dimops.catalog_calls.indices import INDICES
from tests.dimops.catalog_calls.layers import LAYERS
from tests.dimops.catalog_calls.losses import LOSSES
from tests.dimops.catalog_calls.products import PRODUCTS
from tests.dimops.catalog_calls.views import VIEWS

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

"""`examples` is no installed package: it is found from the root of the checkout."""

import sys
from pathlib import Path

# At the end, so that nothing installed is shadowed by a folder of the checkout.
sys.path.append(str(Path(__file__).parents[2]))

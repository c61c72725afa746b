"""python -m mosaic_c"""

import sys

from mosaic_c.cli import main

sys.exit(main())

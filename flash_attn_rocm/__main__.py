"""``python -m flash_attn_rocm``. SPDX-License-Identifier: BSD-3-Clause"""

import sys

from ._commands import main

sys.exit(main())

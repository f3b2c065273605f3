import sys

from tools.restart_drill.cli import main

sys.exit(main())

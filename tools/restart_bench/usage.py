"""--help of the scripts."""

from __future__ import annotations

from megatron.fileio.objects.stores import URI_FORM

from .presets import Preset
from .schedulers import COMMANDS, SCHEDULERS
from .settings import help_text

_STATUS_OF_A_PRESET = (
    "exit status: that of the training; 1 environment or data could not be created, or a dry run\n"
    "found no room in SAVE_DIR; 2 wrong settings or arguments\n"
)
_TINY = """\
The demonstration: trains a tiny model on TP2 x PP2 x DP2, on CPUs if there are fewer than eight GPUs, kills all ranks
at iteration 8, resumes from the checkpoint of iteration 5, and shows where the save and the restart went.

With SAVE_DIR naming a directory that holds a checkpoint, the script only resumes from that. Its only argument is
--config FILE. Exit status 1 also says that a repeated loss or a restored tensor differs.
"""
_EXAMPLES = """\
examples:
  DRY_RUN=1 bash run_70b_tp8_pp8.sh
  bash run_70b_tp8_pp8.sh --config my.conf          lines NAME = VALUE; the environment overrides them
  HOSTFILE=hosts DP=2 ENGINE=lazy SAVE_DIR=/scratch/70b bash run_70b_tp8_pp8.sh
  ITERS=20 DEVICE=cpu bash run_tiny_tp2_pp2_dp2.sh
"""
_SCHEDULERS = "|".join(SCHEDULERS)
SUBMIT = f"""\
Submits a preset as a job of a scheduler: writes the job script to WORK_DIR and passes it to {COMMANDS}. The
repository, WORK_DIR and SAVE_DIR must be on a file system that all nodes share; SAVE_DIR may be {URI_FORM}.

  submit.sh PRESET [--config FILE] [--scheduler {_SCHEDULERS}|none] [--nodes N] [--time H:MM:SS] [-- OPTION ...]

  PRESET        the name in run_PRESET.sh, or MODEL_tpT_ppP for a layout without a script
  --config      file of settings, lines NAME = VALUE; the environment overrides it: docs/cluster.md
  --scheduler   none: run the preset now, without a job (default: the scheduler whose command is on PATH)
  --nodes       nodes of the job (default: what the layout takes). With more nodes each gets fewer ranks, unless
                GPUS_PER_NODE says how many; with LAUNCHER=fork and MAX_RESTARTS (PBS) the others are spares
  --time        when the scheduler ends the job (default: 4:00:00). Slurm sends SIGTERM 120 s earlier, at which a
                training saves and ends (--exit-signal-handler)
  --            followed by further options of {COMMANDS}: --account, --partition, -A, -q

The job is requeued after a node failure, and then resumes. It gets the settings of the preset's script (run_PRESET.sh
--help), of the environment and of --config FILE, with their values at submission. Settings, flags and DATA_PATH are
checked before. Further settings:
  IMAGE      Apptainer image whose Python the ranks run with (default: the .venv of the repository)
  DRY_RUN=1  print the job, and the command that submits it, with *** in place of secrets; touch nothing.
             DRY_RUN=plan also prints what the run needs on stderr, as the preset's script does

examples:
  ENGINE=lazy SAVE_DIR=/scratch/70b bash submit.sh 70b_tp8_pp8 -- --account physics
  ENGINE=lazy SAVE_DIR=s3://bucket/70b bash submit.sh 70b_tp8_pp8
  DRY_RUN=1 bash submit.sh 13b_tp4_pp4 --scheduler pbs --time 1:00:00
  MODE=replay bash submit.sh 70b_tp8_pp8

exit status: 0 submitted, 1 a dry run found no room in SAVE_DIR, 2 wrong arguments or settings, or the scheduler refused
the job; with --scheduler none, or with sbatch's option --wait, that of the preset
"""
_KILL_RESUME = """\
Kill and resume a training, and report where the time went: tools/restart_drill with other defaults.

examples:
  bash kill_resume.sh                               tiny TP2 x PP2 x DP2: two kills in the middle of saves
  bash kill_resume.sh --fault sigstop --at random:7 --supervisor torchrun
  bash kill_resume.sh --cycles 3 -- 7b_tp4_pp2      another preset, or any training command after --

--config FILE has settings of the preset, and OUT_DIR. All other arguments are passed on: `restart-drill --help` and
docs/restart_drill.md explain them.
  OUT_DIR     the default of --out (default: runs/kill_resume-DATE in the repository)
  DRY_RUN=1   check the arguments, and print the command of the drill and that of the preset; touch nothing
"""
_STATUS_OF_A_DRILL = "exit status: 0 every cycle verified, 1 a cycle was not verified, 2 the drill could not run\n"
DRILL_SLURM = f"""\
The restart drill within a Slurm allocation, with srun as launcher.

examples:
  sbatch --nodes 8 --ntasks-per-node 8 --gpus-per-node 8 drill_slurm.sh --fault sigkill-one --at mid-step -- 70b_tp8_pp8
  salloc --nodes 1 --ntasks-per-node 8 bash drill_slurm.sh          tiny TP2 x PP2 x DP2

All arguments go to kill_resume.sh. It runs on the first node, and faults reach the processes of that node: srun then
ends the ranks of the other nodes (--kill-on-bad-exit). The repository, --out and --checkpoints must be on a file system
that all nodes share.
  DRY_RUN=1   print the allocation, the command of the drill and that of the preset; touch nothing
  MASTER_ADDR MASTER_PORT   where rank 0 listens (default: first node, 29500)
{_STATUS_OF_A_DRILL}"""
COMMAND = """\
What the scripts of examples_deepspeed/restart_bench run:

  run PRESET               run_PRESET.sh; run.sh PRESET, where it may also be MODEL_tpT_ppP, a layout without a script
  submit PRESET ...        submit.sh
  kill-resume ...          kill_resume.sh
  drill-slurm ...          drill_slurm.sh

Each answers --help, which has all settings.

examples:
  DRY_RUN=1 bash run.sh 3b_tp2_pp2

exit status: that of the script; 2 wrong settings or arguments
"""


def of_preset(preset: Preset) -> str:
    if preset.model == "tiny":
        said = _TINY
    else:
        ranks = preset.tp * preset.pp
        gpus = "one GPU for each replica" if ranks == 1 else f"{ranks} GPUs per replica"
        said = f"The {preset.model} preset on TP{preset.tp} x PP{preset.pp} x DP ({gpus}).\n"
        said += "Its only argument is --config FILE.\n"
    return f"{said}\n{help_text()}\n{_EXAMPLES}\n{_STATUS_OF_A_PRESET}"


def of_kill_resume() -> str:
    return f"{_KILL_RESUME}{_STATUS_OF_A_DRILL}\n{help_text()}"

"""What each verb of the command line does, in a line, and which options it takes.

Apart from build.py, which is the story; and without anything that `--help` would have to wait for.
"""

from __future__ import annotations

from warmstart.cli import Option

ARCH: Option = ("arch", {"nargs": "?", "default": "", "help": "an arch; default: this machine's GPU, else cpu"})
LANE: Option = (
    "--lane",
    {"default": "", "help": "wheel, vendor or source, where the arch offers it; default: its own"},
)
DEVICE: Option = (
    "--device",
    {
        "choices": ("auto", "always", "never"),
        "default": "auto",
        "help": "give the build this machine's GPU, to prove aiter's core on it; auto: when there is one",
    },
)
FROZEN: Option = ("--frozen", {"action": "store_true", "help": "from the committed, resolved lock or not at all"})
SET: Option = ("--set", {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": "over the preset"})
ENGINE: Option = ("preset", {"nargs": "?", "default": "", "help": "a preset; default: the only engine there is"})

UP: tuple[Option, ...] = (
    ("preset", {"help": "a preset of presets/*.ini"}),
    SET,
    ("--stop", {"action": "append", "default": [], "metavar": "UNIT", "help": "stop this service until down"}),
    ("--force", {"action": "store_true", "help": "start although memory or another program speaks against it"}),
    ("--detach", {"action": "store_true", "help": "return when the container runs, not when the engine is ready"}),
    ("--no-follow", {"dest": "detach", "action": "store_true", "help": "the same"}),
    ("--profile", {"action": "store_true", "help": "with a stack of its Python (py-spy) when it is silent"}),
    (
        "--silence",
        {"type": float, "default": 30.0, "metavar": "SECONDS", "help": "after which it is looked at; %(default)g"},
    ),
)
DOWN: tuple[Option, ...] = (ENGINE,)
LOGS: tuple[Option, ...] = (ENGINE, ("-f", {"dest": "follow", "action": "store_true", "help": "follow it"}))
EXEC: tuple[Option, ...] = (("words", {"nargs": "...", "metavar": "[PRESET] -- COMMAND", "help": "what to run in it"}),)
WATCH: tuple[Option, ...] = (
    ("preset", {"help": "an engine's preset"}),
    ("--record", {"action": "store_true", "help": "nobody else follows its start"}),
)
SEED: tuple[Option, ...] = (
    ("do", {"nargs": "?", "default": "ls", "choices": ("make", "push", "pull", "verify", "ls"), "help": "what to do"}),
    (
        "what",
        {
            "nargs": "?",
            "default": "",
            "help": "make: an arch; push, pull, verify: a seed's tag or its name in a registry",
        },
    ),
    (
        "--from",
        {"dest": "source", "default": "", "help": "make: a volume or a folder of caches; default: the volume of `up`"},
    ),
    (
        "--tier",
        {"default": "", "help": "make: kernels,verdicts,artefacts; default: the first two, and all with a model"},
    ),
    ("--preset", {"default": "", "help": "make: the preset whose model and flags the artefacts are of"}),
    (
        "--set",
        {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": "make: over the preset, as up got it"},
    ),
    ("--model", {"default": "", "help": "make: the same without a preset; nothing checks what is said"}),
    ("--flags", {"default": "", "help": "make: the flags of vllm serve that go with --model"}),
    ("--seed", {"default": "", "help": "push: the tag of a seed here; default: the tag that it goes to"}),
    ("--into", {"default": "", "help": "pull: a volume or a folder for caches; default: the volume of `up`"}),
    ("--arch", {"default": "", "help": "pull: the arch of the image; default: this machine's"}),
    ("--cu", {"type": int, "default": 0, "metavar": "N", "help": "compute units of a GPU that isn't in this machine"}),
    ("--lane", {"default": "", "help": "the lane of the image, where the arch offers several"}),
)

TABLE: dict[str, tuple[str, tuple[Option, ...]]] = {
    "archs": ("all archs: lane, versions, validated on hardware or not", ()),
    "plan": ("what would be built, and which file set each value", (ARCH, LANE, FROZEN)),
    "explain": (
        "what changed since the last build, and which layers that rebuilds",
        (
            ARCH,
            LANE,
            FROZEN,
            ("--against", {"default": "", "help": "a plan in a JSON file, instead of the last build's"}),
        ),
    ),
    "render": (
        "the Containerfile",
        (ARCH, LANE, FROZEN, ("-o", {"dest": "output", "default": "", "help": "a file"})),
    ),
    "lock": (
        "resolve all versions and hashes, or check them",
        (
            ARCH,
            LANE,
            ("--check", {"action": "store_true", "help": "only say whether the lock fits the profile"}),
            ("--pins", {"action": "store_true", "help": "versions only for what the vendors' indexes have"}),
            ("--choose", {"default": "", "help": "one of the profile's wheels.choices: upstream, for cpu"}),
            ("--made", {"action": "append", "default": [], "help": "a wheel that a build from sources left"}),
            ("--without-index", {"action": "append", "default": [], "help": "do without this index of the profile"}),
        ),
    ),
    "image": (
        "build the image",
        (
            ARCH,
            LANE,
            DEVICE,
            FROZEN,
            ("--no-cache", {"action": "store_true", "help": "run every step again"}),
            ("--no-wait", {"action": "store_true", "help": "fail when another build of the arch runs"}),
        ),
    ),
    "verify": (
        "run the image tests and write their record",
        (
            ARCH,
            LANE,
            ("--image", {"default": "", "help": "an image by reference or id, instead of the last build"}),
            ("--only", {"default": "", "help": "a pytest -k expression: try a part, write no record"}),
        ),
    ),
    "rehearse": (
        "build and test an arch's image with stand-ins for what the network can't reach",
        (
            ARCH,
            ("--all", {"action": "store_true", "help": "every arch with wheels of a vendor"}),
            ("--first", {"action": "store_true", "help": "stop at the first image test that fails"}),
        ),
    ),
    "size": ("size by layer and component, against the budget", (ARCH, LANE)),
    "patches-check": ("apply all patches to the sources they are for", ()),
    "doctor": (
        "what is wrong with this machine for an image, with a remedy each",
        (
            ("--image", {"default": "", "help": "an image by reference; default: the one that this machine would get"}),
            ("--root", {"default": "/", "help": "a folder with the sys, proc, dev and etc of another machine"}),
        ),
    ),
    "phases": ("a saved vLLM start log as phases with seconds", (("file", {"help": "the log"}),)),
    "bench-doctor": (
        "is the device's clock to be trusted, by which kernels are tuned",
        (ARCH, ("--image", {"default": "", "help": "an image by reference or id, instead of the last build"})),
    ),
    "presets": (
        "all presets, or one of them whole",
        (("preset", {"nargs": "?", "default": "", "help": "a preset; without one all are listed"}), SET),
    ),
    "emit": (
        "a preset as a file for Quadlet, compose, llama-swap or distrobox",
        (
            ("kind", {"choices": ("quadlet", "compose", "llama-swap", "distrobox"), "help": "what the file is for"}),
            ("preset", {"nargs": "*", "help": "a preset; llama-swap takes several, without one all for the arch"}),
            SET,
            ("--arch", {"default": "", "help": "the arch of the machine with the file; default: this one's"}),
            ("-o", {"dest": "output", "default": "", "help": "a file"}),
        ),
    ),
    "up": ("serve a preset's model, its phases shown until it is ready", UP),
    "down": ("stop an engine, and see that its memory came back", DOWN),
    "status": ("engines, devices and memory", ()),
    "logs": ("an engine's log", LOGS),
    "exec": ("run a command in an engine's container", EXEC),
    "gpu-check": ("launch a kernel in the image: does the GPU run its device code?", (ARCH,)),
    "watch": ("watch an engine's memory until it ends (`up` starts this)", WATCH),
    "seed": ("caches as images: make, push, pull, verify, ls", SEED),
    "prune": ("free old images, layers and caches of warmstart", ()),
}

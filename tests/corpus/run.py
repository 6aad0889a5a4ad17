#!/usr/bin/env python
"""Runs the bug corpus against a torch.compile backend.

    python run.py none ...        plain eager, no torch.compile: shows that the cases themselves hold
    python run.py BACKEND [--dir part_a] [--case SUBSTR] [--device cpu|cuda]
                  [--timeout 120] [--jobs 1] [--json OUT] [--import MODULE] [-v]
    python run.py BACKEND --serve   many cases in one process: a file name a line on standard input; answers the status
                                    of each and then the line DONE

Otherwise each case runs in a fresh process with an empty cache folder.
A case file has either
    build() -> (fn_or_module, make_inputs(seed) -> tuple)   compared by this runner, or
    check(compile_fn, device)                               raising AssertionError,
and the constants SOURCE, KIND, NEEDS_CUDA, TRAIN, TOL (optional: MIN_GPUS, FP64,
STRIDES, SEEDS, COMPILE_KW, BIG_GIB).
Exit status: the number of FAILs (0 if all pass).  One line per case:
    PASS | FAIL(wrong) | FAIL(raise) | FAIL(timeout) | SKIP   name   [kind]   detail
"""
import argparse
import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))


def load(path):
    sys.path.insert(0, HERE)
    spec = importlib.util.spec_from_file_location("case", path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


def child(path, backend, device, extra_import):
    import warnings
    warnings.filterwarnings("ignore")
    import copy
    import torch
    import torch.utils._pytree as pt
    from _util import leaves

    for name in filter(None, [extra_import, "fxfuse" if backend == "fxfuse" else None]):
        __import__(name)
    torch.set_num_threads(max(1, min(2, torch.get_num_threads())))
    m = load(path)
    need_cuda = getattr(m, "NEEDS_CUDA", False)
    if need_cuda:
        device = "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("SKIP needs CUDA"); return
    if getattr(m, "MIN_GPUS", 1) > 1 and torch.cuda.device_count() < m.MIN_GPUS:
        print(f"SKIP needs {m.MIN_GPUS} GPUs"); return

    def compile_fn(obj, **kw):
        return obj if backend == "none" else torch.compile(obj, backend=backend, **kw)
    compile_fn.backend = "eager" if backend == "none" else backend

    if hasattr(m, "check"):
        m.check(compile_fn, device)
        print("PASS"); return

    TOL = getattr(m, "TOL", 1e-4)
    train = getattr(m, "TRAIN", True)
    fp64 = getattr(m, "FP64", True)
    kw = getattr(m, "COMPILE_KW", {})

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        y = x.detach().to(device)
        if y is x or y.data_ptr() == x.data_ptr():      # keep layout (strides), fresh storage
            y = copy.deepcopy(x.detach())
        return y.requires_grad_(x.requires_grad)

    def dbl(x):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_complex():
            return x.detach().to(torch.complex128).requires_grad_(x.requires_grad)
        return x

    def step(fn, mod, args):
        torch.manual_seed(0)
        orig = [a for a in leaves(args)]
        if not train:
            with torch.no_grad():
                out = fn(*args)
            grads, names = [], []
        else:
            work = [a for a in orig]
            out = fn(*args)
            outs = [o for o in leaves(out) if (o.is_floating_point() or o.is_complex()) and o.requires_grad]
            loss = 0
            for i, o in enumerate(outs):
                oo = torch.view_as_real(o) if o.is_complex() else o
                c = torch.linspace(0.5, 1.5, oo.numel(), device=oo.device, dtype=torch.float64).reshape(oo.shape)
                loss = loss + (oo.double() * c).sum() * (i + 1)
            wrt = [a for a in work if a.requires_grad and a.is_leaf]
            names = [f"input{i}" for i in range(len(wrt))]
            if mod is not None:
                for n, p in mod.named_parameters():
                    if p.requires_grad:
                        wrt.append(p); names.append(n)
            grads = list(torch.autograd.grad(loss, wrt, allow_unused=True)) if outs and wrt else []
        bufs = [b.detach().clone() for b in mod.buffers()] if mod is not None else []
        return leaves(out), dict(zip(names, grads)), [a.detach() for a in orig], bufs

    def rmse(a, b):
        d = (a.double() - b.double()) if not a.is_complex() else (a - b).abs().double()
        return d.pow(2).mean().sqrt().item()

    def cmp(tag, got, want, ref64):
        if want is None or got is None:
            assert got is None and want is None, f"{tag}: None-ness differs"
            return
        assert got.dtype == want.dtype, f"{tag}: dtype {got.dtype}, eager {want.dtype}"
        assert got.shape == want.shape, f"{tag}: shape {tuple(got.shape)}, eager {tuple(want.shape)}"
        if want.numel() == 0:
            return
        if want.is_floating_point():
            for nm, f in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
                a, b = f(got), f(want)
                assert torch.equal(a, b), f"{tag}: {nm} differs at {int((a != b).sum())}/{a.numel()} places"
        if torch.allclose(got, want, rtol=TOL, atol=TOL, equal_nan=True):
            return
        if ref64 is not None and ref64.shape == want.shape:
            ok = ~torch.isnan(want.abs()) & ~torch.isinf(want.abs())
            eg, ee = rmse(got[ok], ref64.to(got.device)[ok]), rmse(want[ok], ref64.to(got.device)[ok])
            if eg <= 3 * ee + 1e-12:                     # as near to fp64 as eager is
                return
        diff = (got.double() - want.double()).abs() if not got.is_complex() else (got - want).abs()
        raise AssertionError(f"{tag}: max|diff| {diff.nan_to_num().max().item():.4g} (tol {TOL})")

    for seed in getattr(m, "SEEDS", (0, 1)):
        torch._dynamo.reset()
        torch.manual_seed(7)
        fn, make_inputs = m.build()
        is_mod = isinstance(fn, torch.nn.Module)
        if is_mod:
            fn = fn.to(device)
        base = make_inputs(seed)
        e_fn = copy.deepcopy(fn) if is_mod else fn
        c_fn = copy.deepcopy(fn) if is_mod else fn
        e = step(e_fn, e_fn if is_mod else None, pt.tree_map(move, base))
        r64 = None
        if fp64:
            try:
                d_fn = copy.deepcopy(fn).double() if is_mod else fn
                r64 = step(d_fn, d_fn if is_mod else None, pt.tree_map(dbl, pt.tree_map(move, base)))
            except Exception:
                r64 = None
        comp = compile_fn(c_fn, **kw)
        for rep in range(2 if not is_mod or not list(c_fn.buffers()) else 1):
            c = step(comp, c_fn if is_mod else None, pt.tree_map(move, base))
            for i, (g, w) in enumerate(zip(c[0], e[0], strict=True)):
                cmp(f"seed{seed} out{i}", g.detach(), w.detach(), r64[0][i].detach() if r64 else None)
                if getattr(m, "STRIDES", False):
                    assert g.stride() == w.stride(), f"out{i}: stride {g.stride()}, eager {w.stride()}"
            assert set(c[1]) == set(e[1]), f"gradients of {sorted(set(e[1]) ^ set(c[1]))} differ in existence"
            for k in e[1]:
                cmp(f"seed{seed} grad[{k}]", c[1][k], e[1][k], r64[1].get(k) if r64 else None)
            for i, (g, w) in enumerate(zip(c[2], e[2], strict=True)):
                cmp(f"seed{seed} input{i} after call", g, w, None)
            for i, (g, w) in enumerate(zip(c[3], e[3], strict=True)):
                cmp(f"seed{seed} buffer{i}", g, w, None)
    print("PASS")


def serve(backend, device, extra_import):
    import torch
    for line in sys.stdin:
        torch._dynamo.reset()
        try:
            child(line.strip(), backend, device, extra_import)
        except AssertionError as e:
            print("WRONG " + " ".join(str(e).split())[:300])
        except Exception as e:  # noqa: BLE001
            print("RAISE " + f"{type(e).__name__}: " + " ".join(str(e).split())[:260])
        print("DONE", flush=True)


def in_a_process(f, a, shared):
    """Runs one case and prints its line."""
    tmp = tempfile.mkdtemp(prefix="corpus_")         # plan caches: fresh for each case
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=shared, TORCHINDUCTOR_FX_GRAPH_CACHE="0",
               TORCHINDUCTOR_AUTOGRAD_CACHE="0",
               TRITON_CACHE_DIR=os.path.join(tmp, "tri"), FXFUSE_CACHE_DIR=os.path.join(tmp, "fx"),
               TORCHINDUCTOR_COMPILE_THREADS="1", PYTHONPATH=HERE + os.pathsep + os.environ.get("PYTHONPATH", ""))
    t0 = time.time()
    meta = {}
    for line in open(f):
        for k in ("SOURCE", "KIND"):
            if line.startswith(k + " "):
                meta[k] = line.split("=", 1)[1].strip().strip("'\"")
    cmd = [sys.executable, __file__, a.backend, "--one", f, "--device", a.device] + \
          (["--import", a.imp] if a.imp else []) + (["-v"] if a.v else [])
    try:
        p = subprocess.run(cmd, env=env, capture_output=True, text=True, timeout=a.timeout)
        last = (p.stdout.strip().splitlines() or [""])[-1]
        if p.returncode == 0 and last.startswith("SKIP"):
            st, det = "SKIP", last[5:]
        elif p.returncode == 0 and last == "PASS":
            st, det = "PASS", ""
        elif last.startswith("WRONG"):
            st, det = "FAIL(wrong)", last[6:]
        elif last.startswith("RAISE"):
            st, det = "FAIL(raise)", last[6:]
        else:
            st, det = "FAIL(crash)", f"rc={p.returncode} " + " ".join(p.stderr.split())[-200:]
        if a.v and st.startswith("FAIL"):
            print(p.stderr[-3000:])
    except subprocess.TimeoutExpired:
        st, det = "FAIL(timeout)", f"{a.timeout:.0f}s"
    shutil.rmtree(tmp, ignore_errors=True)
    name = os.path.basename(os.path.dirname(f)) + "/" + os.path.basename(f)[:-3]
    dt = time.time() - t0
    print(f"{st:13s} {name:44s} [{meta.get('KIND', '')}] {dt:5.1f}s {det[:170]}", flush=True)
    return dict(case=name, status=st, detail=det, seconds=round(dt, 1), **meta)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("backend")
    ap.add_argument("--dir", action="append")
    ap.add_argument("--case", default="")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--timeout", type=float, default=120)
    ap.add_argument("--json")
    ap.add_argument("--import", dest="imp", default="")
    ap.add_argument("--one")
    ap.add_argument("--serve", action="store_true")
    ap.add_argument("--jobs", type=int, default=1, help="cases at a time")
    ap.add_argument("-v", action="store_true")
    a = ap.parse_args()
    if a.serve:
        serve(a.backend, a.device, a.imp)
        return
    if a.one:
        try:
            child(a.one, a.backend, a.device, a.imp)
        except AssertionError as e:
            print("WRONG " + " ".join(str(e).split())[:300])
            if a.v:
                raise
            sys.exit(3)
        except Exception as e:  # noqa: BLE001
            print("RAISE " + f"{type(e).__name__}: " + " ".join(str(e).split())[:260])
            if a.v:
                raise
            sys.exit(4)
        sys.exit(0)

    dirs = a.dir or ["part_a"]
    files = [f for d in dirs for f in sorted(glob.glob(os.path.join(HERE, d, "case_*.py"))) if a.case in f]
    shared = tempfile.mkdtemp(prefix="corpus_gen_")      # generated sources and binaries only (content-addressed)
    with ThreadPoolExecutor(a.jobs) as pool:
        res = list(pool.map(lambda f: in_a_process(f, a, shared), files))
    shutil.rmtree(shared, ignore_errors=True)
    n = lambda s: sum(r["status"].startswith(s) for r in res)
    print(f"SUMMARY backend={a.backend} device={a.device} cases={len(res)} pass={n('PASS')} "
          f"fail={n('FAIL')} (wrong={n('FAIL(wrong')} raise={n('FAIL(raise')} crash={n('FAIL(crash')} "
          f"timeout={n('FAIL(timeout')}) skip={n('SKIP')}")
    if a.json:
        json.dump(res, open(a.json, "w"), indent=1)
    sys.exit(min(n("FAIL"), 100))


if __name__ == "__main__":
    main()

"""Writes faces_detector.onnx, faces_recogniser.onnx and faces.npz: tiny networks of the forms of SCRFD and ArcFace with
random weights, and what Stability's own code makes of a picture with them. Run once, outside of the tests, with a clone
of Stability-AI/StableCascade (7a7d341):

    pip install onnx==1.23.2 onnxruntime==1.32.0 opencv-python-headless==5.0.0.93
    python tests/conditions/record_faces.py CLONE

Its modules/cnet_modules/face_id/arcface.py runs ONNX by onnx2torch and turns faces upright by InsightFace; both are
stood in for here: by onnxruntime, and by OpenCV with Umeyama's formula. `DIGESTS` in test_faces.py are the files'.
"""

import hashlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cv2
import numpy as np
import onnx
import onnxruntime
import scenes
import torch
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).parent
POINTS = [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]


class Graph:
    """Convolutions and what is between them, with random weights."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.nodes, self.weights, self.count = [], [], 0

    def add(self, kind, *inputs, **more):
        self.count += 1
        name = f"t{self.count}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **more))
        return name

    def constant(self, values):
        self.count += 1
        self.weights.append(numpy_helper.from_array(np.asarray(values), f"w{self.count}"))
        return f"w{self.count}"

    def conv(self, x, before, after, side=3, stride=1, bias=0.0, scale=1.0):
        weight = self.random.normal(0, scale * (2 / (before * side**2)) ** 0.5, (after, before, side, side))
        biases = np.full(after, bias) + self.random.normal(0, 0.05, after)
        own = [self.constant(each.astype(np.float32)) for each in (weight, biases)]
        pads = [side // 2] * 4
        return self.add("Conv", x, *own, kernel_shape=[side, side], strides=[stride, stride], pads=pads)

    def written(self, path, x_shape, outputs):
        x = helper.make_tensor_value_info("input", TensorProto.FLOAT, x_shape)
        found = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", "columns"]) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", [x], found, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.checker.check_model(model)
        onnx.save(model, path)


def detector(path):
    """Levels of stride 8, 16 and 32, each with two anchors: scores, distances and points, level after level of each."""
    g = Graph(5)
    x = g.add("Relu", g.conv("input", 3, 8, stride=2))
    x = g.add("Relu", g.conv(x, 8, 8, stride=2))
    scores, boxes, points = [], [], []
    for _ in range(3):
        x = g.add("Relu", g.conv(x, 8, 8, stride=2))
        for found, width, bias, scale, last in (
            (scores, 1, -1.6, 0.7, "Sigmoid"), (boxes, 4, 1.5, 0.3, "Relu"), (points, 10, 0.0, 0.5, None)
        ):  # fmt: skip
            y = g.conv(x, 8, 2 * width, bias=bias, scale=scale)
            y = g.add("Transpose", y, perm=[2, 3, 0, 1])
            y = g.add("Reshape", y, g.constant(np.array([-1, width], np.int64)))
            found.append(g.add(last, y) if last else y)
    g.written(path, [1, 3, 320, 320], [*scores, *boxes, *points])


def recogniser(path):
    g = Graph(6)
    x = "input"
    for before, after in ((3, 8), (8, 8), (8, 8), (8, 1)):
        x = g.add("PRelu", g.conv(x, before, after, stride=2), g.constant(np.full((after, 1, 1), 0.2, np.float32)))
    x = g.add("Flatten", x)
    weight = g.random.normal(0, 0.1, (49, 512)).astype(np.float16).astype(np.float32)
    x = g.add("MatMul", x, g.constant(weight))
    g.written(path, [1, 3, 112, 112], [x])


class Session:
    """In the place of a network that onnx2torch has made."""

    def __init__(self, path):
        self.own = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def __call__(self, blob):
        found = [torch.from_numpy(each) for each in self.own.run(None, {"input": blob.numpy()})]
        return found if len(found) > 1 else found[0]

    def to(self, **_):
        return self

    def parameters(self):
        return []

    def eval(self):
        return self


def norm_crop(image, landmark, image_size):
    """InsightFace's, with Umeyama's similarity written down."""
    own, wanted = landmark - landmark.mean(0), np.array(POINTS) - np.mean(POINTS, 0)
    u, s, v = np.linalg.svd(wanted.T @ own / 5)
    d = np.array([1, np.sign(np.linalg.det(u) * np.linalg.det(v))])
    turn = u @ np.diag(d) @ v * (s @ d) / own.var(0).sum()
    matrix = np.concatenate([turn, (np.mean(POINTS, 0) - turn @ landmark.mean(0))[:, None]], 1)
    return cv2.warpAffine(image, matrix, (image_size, image_size), borderValue=0.0)


def main(clone):
    paths = [str(HERE / f"faces_{name}.onnx") for name in ("detector", "recogniser")]
    detector(paths[0])
    recogniser(paths[1])
    for name, content in (
        ("onnx2torch", {"convert": Session}),
        ("insightface", {}),
        ("insightface.utils", {"face_align": SimpleNamespace(norm_crop=norm_crop)}),
    ):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    sys.path.insert(0, str(Path(clone) / "modules" / "cnet_modules" / "face_id"))
    onnx.load = lambda path: path
    import arcface

    finds, knows = arcface.FaceDetector(paths[0], device="cpu"), arcface.ArcFaceRecognizer(paths[1])
    found = {}
    for name, size in (("wide", (160, 224)), ("tall", (200, 96))):
        image = cv2.cvtColor(scenes.scene(*size), cv2.COLOR_RGB2BGR)
        for most in (4, 50):
            boxes, points = finds.detect(image, max_num=most)
            found |= {f"{name}/{most}/boxes": boxes, f"{name}/{most}/points": points}
        faces = [SimpleNamespace(kps=each) for each in found[f"{name}/4/points"]]
        found[f"{name}/aligned"] = np.stack([norm_crop(image, face.kps, 112)[::4, ::4, ::-1] for face in faces])
        vectors = np.stack([knows.get(image, face).numpy() for face in faces])
        found[f"{name}/vectors"] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        print(name, len(found[f"{name}/50/boxes"]), found[f"{name}/4/boxes"].round(1).tolist())
    np.savez_compressed(HERE / "faces.npz", **found)
    for path in (*map(Path, paths), HERE / "faces.npz"):
        print(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1])

// Sample images, drawn here so that the page needs no files: two handwritten digits, a flower, mountains, an apple.

import { h } from "./elements.js";

const SIDE = 256;
// Two handwritten digits of the UCI set that scikit-learn ships: 8 × 8 pixels from 0 (blank) to g (16, ink).
const SIX = "002g8000008f500002g7000003g7510007gggf3005gc4ae000ed5af0003dgg70";
const FIVE = "02dgggb005ga541006g7300009ggg6000384bf000001cf00004dg60002gf8000";

export const SAMPLES = [
  { name: "six", label: "A handwritten six on petals", draw: (c) => digit(c, SIX, petals, "#ffe9d6") },
  { name: "five", label: "A handwritten five on mountains", draw: (c) => digit(c, FIVE, mountains, "#e4f0ff") },
  { name: "flower", label: "A flower", draw: flower },
  { name: "mountains", label: "Mountains and a lake", draw: mountains },
  { name: "apple", label: "An apple on a table", draw: apple },
];

/** A canvas with the sample on it. */
export function drawSample(sample) {
  const canvas = h("canvas", { width: SIDE, height: SIDE, "aria-hidden": "true" });
  sample.draw(canvas.getContext("2d"));
  return canvas;
}

/** The sample as an image file. */
export function sampleFile(sample) {
  return new Promise((resolve) => {
    drawSample(sample).toBlob((blob) => resolve(new File([blob], `${sample.name}.png`, { type: "image/png" })));
  });
}

function digit(c, pixels, background, ink) {
  background(c);
  c.fillStyle = "rgba(0, 0, 0, .75)"; // as dark as the photographs behind the digits of vit-memory demo
  c.fillRect(0, 0, SIDE, SIDE);
  const small = h("canvas", { width: 10, height: 10 }); // a blank pixel around it: no hard edges when it is enlarged
  const image = new ImageData(8, 8);
  for (let i = 0; i < 64; i++) image.data.set([255, 255, 255, (parseInt(pixels[i], 17) / 16) * 255], 4 * i);
  small.getContext("2d").putImageData(image, 1, 1);
  const large = h("canvas", { width: SIDE, height: SIDE });
  const context = large.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(small, -12, -12, 280, 280);
  const stroke = context.getImageData(0, 0, SIDE, SIDE);
  const [red, green, blue] = [1, 3, 5].map((k) => parseInt(ink.slice(k, k + 2), 16));
  for (let k = 0; k < stroke.data.length; k += 4) {
    // Enlarged 28 times, the edges of a stroke are a blur.
    const edge = Math.min(1, Math.max(0, (stroke.data[k + 3] / 255 - 0.4) / 0.35));
    stroke.data.set([red, green, blue, 255 * edge * edge * (3 - 2 * edge)], k);
  }
  context.putImageData(stroke, 0, 0);
  c.drawImage(large, 0, 0);
}

function petals(c) {
  c.save();
  c.scale(3.2, 3.2);
  c.translate(-120, -20);
  flower(c);
  c.restore();
}

function flower(c) {
  const random = numbers(7);
  c.fillStyle = vertical(c, ["#3c6b45", "#1f3d2b"]);
  c.fillRect(0, 0, SIDE, SIDE);
  for (let i = 0; i < 26; i++) {
    disc(
      c,
      random() * SIDE,
      random() * SIDE,
      10 + random() * 34,
      `hsla(${90 + random() * 60}, 45%, ${35 + random() * 25}%, .22)`,
    );
  }
  c.strokeStyle = "#2f6b33";
  c.lineWidth = 9;
  c.beginPath();
  c.moveTo(128, 120);
  c.quadraticCurveTo(150, 200, 132, 262);
  c.stroke();
  for (let ring = 0; ring < 2; ring++) {
    for (let i = 0; i < 11; i++) {
      c.save();
      c.translate(128, 116);
      c.rotate(((i + ring / 2) * 2 * Math.PI) / 11);
      const petal = c.createLinearGradient(0, 0, 0, -88);
      petal.addColorStop(0, "#c43b5e");
      petal.addColorStop(1, ring ? "#ffb3c4" : "#f2809b");
      c.fillStyle = petal;
      c.beginPath();
      c.ellipse(0, ring ? -46 : -56, 15, ring ? 32 : 38, 0, 0, 2 * Math.PI);
      c.fill();
      c.restore();
    }
  }
  disc(c, 128, 116, 24, "#e7a71c");
  for (let i = 0; i < 60; i++) {
    const angle = random() * 2 * Math.PI;
    const radius = Math.sqrt(random()) * 21;
    disc(c, 128 + radius * Math.cos(angle), 116 + radius * Math.sin(angle), 1.8, i % 2 ? "#a8660c" : "#ffd964");
  }
}

function mountains(c) {
  const random = numbers(3);
  c.fillStyle = vertical(c, ["#6fa8dc", "#f6d7b0"]);
  c.fillRect(0, 0, SIDE, SIDE);
  disc(c, 190, 62, 24, "#fff3cf");
  const ridges = [
    ["#8aa0c2", 96, 42],
    ["#5d769e", 124, 34],
    ["#38506f", 150, 26],
  ];
  for (const [colour, height, rough] of ridges) {
    c.fillStyle = colour;
    c.beginPath();
    c.moveTo(0, SIDE);
    for (let x = 0; x <= SIDE; x += 16)
      c.lineTo(x, height - Math.abs(Math.sin(x / 47 + height)) * rough + random() * 12);
    c.lineTo(SIDE, SIDE);
    c.fill();
  }
  c.fillStyle = "#2c5f7c";
  c.fillRect(0, 190, SIDE, 66);
  c.fillStyle = "rgba(255, 243, 207, .35)";
  for (let i = 0; i < 22; i++) c.fillRect(150 + random() * 70, 194 + random() * 58, 12 + random() * 26, 1.6);
  c.fillStyle = "#1c3a2c";
  for (let i = 0; i < 15; i++) {
    const x = i * 18 + random() * 8;
    const top = 150 + random() * 22;
    c.beginPath();
    c.moveTo(x, top);
    c.lineTo(x - 9, 196);
    c.lineTo(x + 9, 196);
    c.fill();
  }
}

function apple(c) {
  c.fillStyle = vertical(c, ["#d9d4c7", "#efe9dc"]);
  c.fillRect(0, 0, SIDE, SIDE);
  c.fillStyle = vertical(c, ["#8f6239", "#6b4526"]);
  c.fillRect(0, 172, SIDE, 84);
  c.fillStyle = "rgba(40, 20, 8, .35)";
  c.beginPath();
  c.ellipse(138, 212, 78, 15, 0, 0, 2 * Math.PI);
  c.fill();
  const skin = c.createRadialGradient(98, 96, 8, 124, 138, 96);
  skin.addColorStop(0, "#ff9b7a");
  skin.addColorStop(0.35, "#d8322b");
  skin.addColorStop(1, "#7d1218");
  c.fillStyle = skin;
  c.beginPath();
  c.moveTo(128, 78);
  c.bezierCurveTo(160, 48, 214, 70, 206, 134);
  c.bezierCurveTo(200, 186, 164, 222, 128, 208);
  c.bezierCurveTo(92, 222, 56, 186, 50, 134);
  c.bezierCurveTo(42, 70, 96, 48, 128, 78);
  c.fill();
  c.strokeStyle = "#4b2e17";
  c.lineWidth = 7;
  c.lineCap = "round";
  c.beginPath();
  c.moveTo(128, 82);
  c.quadraticCurveTo(128, 56, 142, 40);
  c.stroke();
  c.fillStyle = "#5b9a3c";
  c.beginPath();
  c.moveTo(136, 58);
  c.quadraticCurveTo(166, 24, 196, 44);
  c.quadraticCurveTo(172, 70, 136, 58);
  c.fill();
}

function disc(c, x, y, radius, colour) {
  c.fillStyle = colour;
  c.beginPath();
  c.arc(x, y, radius, 0, 2 * Math.PI);
  c.fill();
}

function vertical(c, [top, bottom]) {
  const gradient = c.createLinearGradient(0, 0, 0, SIDE);
  gradient.addColorStop(0, top);
  gradient.addColorStop(1, bottom);
  return gradient;
}

/** The same numbers between 0 and 1 every time: a sample must be the same image in every browser. */
function numbers(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

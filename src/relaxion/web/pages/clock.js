// Which force call is shown. Films and plots of a page follow one clock, so that all go in step.
"use strict";
Relaxion.Clock = class {
  constructor(last) {
    this.last = Math.max(1, last);
    this.position = 1; // a force call; between two of them while playing
    this.playing = false;
    this.followers = [];
    this.secondsPerCall = Math.min(0.9, Math.max(2.5, Math.min(12, 0.45 * this.last)) / Math.max(1, this.last - 1));
  }

  follow(tell) {
    this.followers.push(tell);
    tell(this);
  }

  tell() {
    for (const tell of this.followers) tell(this);
  }

  get call() {
    return Math.floor(this.position + 1e-9);
  }

  go(position) {
    this.position = Math.min(this.last, Math.max(1, position));
    this.tell();
  }

  step(by) {
    this.pause();
    this.go(by > 0 ? this.call + 1 : Math.ceil(this.position - 1e-9) - 1);
  }

  play() {
    if (this.position >= this.last) this.position = 1;
    this.playing = true;
    this.tell();
  }

  pause() {
    if (!this.playing) return;
    this.playing = false;
    this.tell();
  }

  // called by the page's one animation loop
  advance(seconds) {
    if (!this.playing) return;
    this.position = Math.min(this.last, this.position + seconds / this.secondsPerCall);
    if (this.position >= this.last) this.playing = false;
    this.tell();
  }
};

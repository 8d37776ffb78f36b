// Package step is the seam between the plugin and the world: each change of a
// file, a link, a queue, a BPF map or an API object is one step, and has a
// name. In production a step is a function call. Tests put in a Seam that
// counts steps, fails them, or kills the process before or after one: that is
// how they find every moment at which a crash leaves something half done,
// without a list of such moments.
package step

// Seam runs a step. It may run something before or after do, or return an
// error without running it. The zero value runs it.
type Seam func(name string, do func() error) error

// Do runs a step.
func (s Seam) Do(name string, do func() error) error {
	if s == nil {
		return do()
	}
	return s(name, do)
}

// Command dra-conformance holds a DRA kubelet plugin that runs on a node to what
// Kubernetes asks of it. It is run on that node, as root, and plays kubelet and
// scheduler: claims that it makes in --namespace are prepared and unprepared,
// no pod is started.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/dra-shared/dra-driver-shared/conformance"
)

// caseTimeout is what one case may take at the most.
const caseTimeout = time.Minute

func main() {
	var t conformance.Target
	kubeconfig := flag.String("kubeconfig", os.Getenv("KUBECONFIG"), "kubeconfig of an administrator")
	flag.StringVar(&t.Driver, "driver", "", "name of the driver")
	flag.StringVar(&t.Node, "node", "", "name of the node that this runs on")
	flag.StringVar(&t.Namespace, "namespace", "default", "where claims are made")
	flag.StringVar(&t.DeviceClass, "device-class", "conformance", "DeviceClass that claims name; it need not exist")
	flag.StringVar(&t.Device, "device", "", "use only this device")
	flag.StringVar(&t.Socket, "socket", "", "the plugin's DRA socket, such as /var/lib/kubelet/plugins/DRIVER/dra.sock")
	flag.StringVar(&t.CDIDir, "cdi-dir", "/var/run/cdi", "where the plugin writes CDI specs; empty: do not look")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	failed, err := run(ctx, t, *kubeconfig)
	if err != nil {
		fmt.Fprintln(os.Stderr, "dra-conformance:", err)
	}
	if err != nil || failed > 0 {
		os.Exit(1)
	}
}

func run(ctx context.Context, t conformance.Target, kubeconfig string) (failed int, err error) {
	for name, value := range map[string]string{"--driver": t.Driver, "--node": t.Node, "--socket": t.Socket} {
		if value == "" {
			return 0, fmt.Errorf("%s is needed", name)
		}
	}
	rest, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return 0, err
	}
	rest.QPS, rest.Burst = 50, 100
	if t.Client, err = kubernetes.NewForConfig(rest); err != nil {
		return 0, err
	}
	passed, skipped := 0, 0
	for _, c := range conformance.Cases() {
		caseCtx, cancel := context.WithTimeout(ctx, caseTimeout)
		err := conformance.Do(caseCtx, t, c)
		cancel()
		switch {
		case err == nil:
			passed++
			fmt.Printf("ok    %s\n", c.Name)
		case errors.Is(err, conformance.ErrSkipped):
			skipped++
			fmt.Printf("skip  %s: %v\n", c.Name, err)
		default:
			failed++
			fmt.Printf("FAIL  %s: %v\n      asked for by %s\n", c.Name, err, c.Because)
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	return failed, ctx.Err()
}
